"""Every training job of a fleet: watched, stored, looked at together."""
