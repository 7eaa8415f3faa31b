"""Memory: what is alive at the peak, what grows, and who holds it."""
