"""headcnictl: what an operator types."""
