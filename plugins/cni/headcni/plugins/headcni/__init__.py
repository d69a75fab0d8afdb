"""headcni: the main plugin, which sets up the network of a pod."""
