"""What the device did: kernels, launches, clocks."""
