"""Which address each pod has: pools and strategies, their store, and the headcni-ipam plugin."""
