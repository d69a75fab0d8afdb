"""Network policies in the daemon: where they come from, and what is shown of them."""
