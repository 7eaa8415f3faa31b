"""Padded batches computed of their real tokens alone, packed one behind the other."""
