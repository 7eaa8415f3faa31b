"""Cures, tried for real: each file runs one kind of Trial on what was captured, for some tenths of a second."""
