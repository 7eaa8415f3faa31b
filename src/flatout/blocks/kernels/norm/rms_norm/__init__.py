"""Division by the root of the mean square."""
