"""Attention of one new token to keys and values in a cache, up to a position that the device alone knows."""
