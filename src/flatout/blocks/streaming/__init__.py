"""Modules whose weights are in host memory and come to the device ahead of their use: what training and inference share."""
