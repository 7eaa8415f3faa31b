"""A linear layer with a weight of 4, 8 or 16 bits, for a few rows at a time: the time is that of reading the weight."""
