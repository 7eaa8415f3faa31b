"""Levers of the branch 'parallelism': many at once, on all units."""
