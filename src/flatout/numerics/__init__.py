"""Numbers compared: bit by bit, by checksums that any device can make."""
