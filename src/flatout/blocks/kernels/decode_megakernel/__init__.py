"""Products and attentions of one new token in one launch."""
