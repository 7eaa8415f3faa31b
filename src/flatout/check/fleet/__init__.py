"""What many jobs say together: waste, regressions, sick nodes. Pure functions of their records."""
