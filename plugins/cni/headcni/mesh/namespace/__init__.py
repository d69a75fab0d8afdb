"""The network namespace of daemon mode, which holds HeadCNI's own tailscaled."""
