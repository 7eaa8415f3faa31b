"""Levers of the branch 'communication': between processes, host and device, data and step."""
