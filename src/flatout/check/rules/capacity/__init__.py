"""The step runs out of memory, or holds more of it than it needs."""
