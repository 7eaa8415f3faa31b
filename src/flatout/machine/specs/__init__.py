"""What vendors say about their devices: one spec file a product, each figure with unit, condition and source."""
