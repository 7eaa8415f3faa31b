"""Inference: small models as native code."""
