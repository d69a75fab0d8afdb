"""What the daemon needs from Kubernetes: its pods, annotations of namespaces, and a token."""
