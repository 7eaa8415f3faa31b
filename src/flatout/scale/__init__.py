"""Pure models of runs: how long a step takes on many devices, which layout is best, what failures cost."""
