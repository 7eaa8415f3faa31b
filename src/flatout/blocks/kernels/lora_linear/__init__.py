"""A linear layer with a low-rank adapter."""
