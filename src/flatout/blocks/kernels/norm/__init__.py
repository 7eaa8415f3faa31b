"""Normalisation over the last dimension, alone or of a sum with what passes it by."""
