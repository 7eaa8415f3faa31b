"""Levers of the branch 'memory': where tensors lie, and how long."""
