"""The arithmetic is the bottleneck: more of it than needed, or in a slow dtype."""
