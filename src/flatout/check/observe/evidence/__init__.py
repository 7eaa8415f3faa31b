"""Turns what was observed into the records of Evidence."""
