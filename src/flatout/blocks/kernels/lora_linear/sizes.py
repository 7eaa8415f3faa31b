"""When a product with the adapter in the weight costs less than two apart."""

from __future__ import annotations


def has_enough_rows(rows: int, *, num_out: int, num_in: int) -> bool:
    """Whether passes over the results of so many rows cost more than those over the weight."""
    return rows * (num_out + num_in) >= num_out * num_in
