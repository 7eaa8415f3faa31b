"""Rotary position embedding: pairs of numbers turned by angles that grow with the position."""
