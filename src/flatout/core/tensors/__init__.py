"""Tensors by their numbers: found in nests, compared bit by bit by checksums that any device can make."""
