"""Batches on their way to the step: made by threads, copied to the device ahead of time."""
