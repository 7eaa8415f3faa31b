"""Runs that record themselves, are found again, and are run again."""
