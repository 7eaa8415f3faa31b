"""The steps of a loop: which are watched, and when each began and ended."""
