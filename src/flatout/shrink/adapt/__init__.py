"""Fewer trained parameters for any plain module: low-rank pairs, bottlenecks, prompts, prefixes, biases, selected layers."""
