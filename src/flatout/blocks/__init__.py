"""Building blocks for your own training or inference loop; each works alone."""
