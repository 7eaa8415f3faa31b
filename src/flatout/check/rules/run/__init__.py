"""The run as a whole: debug modes, evaluation passes, what happens around the steps."""
