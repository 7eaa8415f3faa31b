"""Which steps are watched, and when each began and ended."""
