"""One module for each source of evidence, found by its constant COLLECTOR."""
