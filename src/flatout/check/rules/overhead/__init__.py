"""The host is the bottleneck: Python, dispatch, waiting for the device."""
