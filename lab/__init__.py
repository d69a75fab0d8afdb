"""The embedded lab: real systemd nodes, a real Headscale, one machine. Standard library only."""
