"""What can be seen of the daemon: metrics, health, profiles, events, and its control socket."""
