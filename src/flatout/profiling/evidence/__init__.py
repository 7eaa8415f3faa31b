"""From what was seen to the records."""
