"""flatout: makes PyTorch models run flat out, and proves it."""
