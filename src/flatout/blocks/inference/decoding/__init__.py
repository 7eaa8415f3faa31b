"""Tokens one at a time: keys and values in memory that stays where it is, and a step as one CUDA graph."""
