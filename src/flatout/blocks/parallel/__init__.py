"""The processes that a script runs in, and models placed on them."""
