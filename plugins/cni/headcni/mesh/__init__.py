"""The mesh: routes to the pods of other nodes, tailscaled, Headscale, and their settings."""
