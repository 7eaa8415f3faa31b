"""Reductions of the number of parameters."""
