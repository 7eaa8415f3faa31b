"""Watching a script or a step run, without changing what it computes: in goes user code, out comes Evidence."""
