"""Levers of the branch 'graph': what is computed online, and when."""
