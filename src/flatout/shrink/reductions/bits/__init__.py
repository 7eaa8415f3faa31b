"""Reductions that store numbers in fewer bits."""
