"""Training that brings the metric back."""
