"""Zero mean and unit variance."""
