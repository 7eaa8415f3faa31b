"""What makes a model cheaper at a measured price: one file a reduction, by kind."""
