"""Real services, real processes, and what may happen to them."""
