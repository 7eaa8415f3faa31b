"""Attention with a mask that is a structure: which keys each query sees is known before anything is computed."""
