"""Building blocks for training loops; each works alone and is called by name from a user's code."""
