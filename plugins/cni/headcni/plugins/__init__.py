"""The CNI plugins, each with its verbs."""
