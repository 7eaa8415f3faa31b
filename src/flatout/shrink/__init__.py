"""Smaller models and fewer bits: each with its price in accuracy and its gain in time, both measured."""
