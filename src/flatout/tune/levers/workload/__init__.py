"""Levers of the branch 'workload': less arithmetic, fewer trained numbers, fewer bits."""
