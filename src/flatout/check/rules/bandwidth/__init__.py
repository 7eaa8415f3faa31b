"""Memory traffic is the bottleneck."""
