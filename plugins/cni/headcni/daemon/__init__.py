"""The node daemon: the verbs kept warm, and what the node needs between them."""
