"""One module a promise: what it counts, how it is observed, and how a breach is told."""
