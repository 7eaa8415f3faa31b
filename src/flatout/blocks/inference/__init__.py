"""Inference: small models as native code, layers larger than GPU memory, decoding without host waits."""
