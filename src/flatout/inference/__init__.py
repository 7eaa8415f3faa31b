"""Inference: small models as native code, layers beyond the card, decoding without waits."""
