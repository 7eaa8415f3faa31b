"""Expectations about a region of code: one module for each kind of count, how it is observed, and how a failure reads."""
