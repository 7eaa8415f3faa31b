"""Choosing: which levers, in which order, within a budget, with everything that was tried written down."""
