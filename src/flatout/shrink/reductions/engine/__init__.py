"""Reductions that change what runs the model."""
