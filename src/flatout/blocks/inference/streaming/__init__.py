"""Inference with layers whose weights lie on the host or on disk and come to the device ahead of their use."""
