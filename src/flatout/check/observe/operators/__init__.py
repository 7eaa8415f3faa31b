"""Operators of deep steps, by line and module."""
