"""The same script, faster and proved: levers, source rewriting, search, verification."""
