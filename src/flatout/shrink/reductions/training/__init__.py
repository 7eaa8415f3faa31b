"""Reductions of the number of trained parameters."""
