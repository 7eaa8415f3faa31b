"""Pure formulas: how much work an operation is, and how fast a device can possibly do it."""
