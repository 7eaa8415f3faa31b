"""Proving a change: the same steps run before and after it, compared bit for bit or by their errors, and timed in turn."""
