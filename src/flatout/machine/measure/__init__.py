"""Measuring on the live machine: the one timer, honest statistics, and the ceilings of this machine."""
