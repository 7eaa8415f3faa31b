"""What the C file does, one statement after the other, before it is text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from flatout.blocks.inference.native.values import Buffer, Expr, View, leaves

RowKind: TypeAlias = Literal[
    "softmax",
    "safe_softmax",
    "log_softmax",
    "layer_norm",
    "sum",
    "mean",
    "max",
    "min",
    "var",
    "prod",
    "any",
    "all",
    "argmax",
    "argmin",
]


@dataclass(eq=False)
class Map:
    """The assignment dst = expr, element by element."""

    dst: View
    expr: Expr
    note: str = ""


@dataclass(eq=False)
class RowWise:
    """An operation on rows of n contiguous numbers: src (rows, n) to dst (rows, n), or (rows,) for a reduction."""

    kind: RowKind
    dst: View
    src: View
    number: float = 0.0
    """eps of a layer norm, correction of a variance."""
    weight: View | None = None
    bias: View | None = None
    note: str = ""


@dataclass(eq=False)
class MatrixProduct:
    """The product dst (rows, n) = bias + x (rows, k) @ w.

    w lies in groups of 8 blocks of 16 columns, `group` numbers apart; the rows of a group are `row` apart, or one after the
    other where that is 0.
    """

    dst: View
    x: View
    w: View
    n: int
    k: int
    row: int
    group: int
    parts: int = 1
    """Partial sums of each output, which are added at the end: what hides the time of one addition."""
    bias: View | None = None
    is_dot: bool = False
    """w lies as n rows of k numbers, padded to 16: few outputs, each summed in 16 lanes."""
    scales: View | None = None
    """Of int8 weights, one a column; then x is rounded to 16 bits by its largest number, and `sums` are shifted_sums."""
    sums: View | None = None
    note: str = ""


@dataclass(eq=False)
class Gather:
    """A lookup dst (rows, n) = rows of a table (count, n), by indices that are held inside."""

    dst: View
    table: View
    index: View
    note: str = ""


@dataclass(eq=False)
class Push:
    """A new row at the end of a ring's window, before anything reads it; `AdvanceRing` moves the window on."""

    ring: Buffer
    src: View
    note: str = ""


@dataclass(eq=False)
class AdvanceRing:
    """A ring's window moves on by one row."""

    ring: Buffer
    note: str = ""


Statement: TypeAlias = "Map | RowWise | MatrixProduct | Gather | Push | AdvanceRing"


@dataclass
class ProgramBody:
    """All statements, and the memory that they need."""

    statements: list[Statement] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)


def reads(statement: Statement) -> Iterator[View]:
    """All that a statement reads."""
    for part in fields(statement):
        if part.name != "dst":
            yield from leaves(getattr(statement, part.name))


def writes(statement: Statement) -> Buffer:
    """The buffer that it changes."""
    return statement.ring if isinstance(statement, (Push, AdvanceRing)) else statement.dst.buffer
