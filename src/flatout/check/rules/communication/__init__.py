"""The step waits for other processes."""
