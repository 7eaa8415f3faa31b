"""What the C file does, one statement after the other, before it is text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from flatout.inference.native.values import Buffer, Call, Expr, Scalar, View, leaves

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
    """dst = expr, element by element."""

    dst: View
    expr: Expr
    note: str = ""


@dataclass(eq=False)
class RowWise:
    """Over rows of n numbers that lie one after the other: src (rows, n) to dst (rows, n), or (rows,) for a reduction."""

    kind: RowKind
    dst: View
    src: View
    number: float = 0.0
    """eps of a layer norm, correction of a variance."""
    weight: View | None = None
    bias: View | None = None
    note: str = ""


@dataclass(eq=False)
class Product:
    """dst (rows, n) = bias + x (rows, k) @ w.

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
    """dst (rows, n) = rows of a table (count, n), by indices that are held inside."""

    dst: View
    table: View
    index: View
    note: str = ""


@dataclass(eq=False)
class Push:
    """A new row at the end of a ring's window, before anything reads it; `Turn` moves the window on."""

    ring: Buffer
    src: View
    note: str = ""


@dataclass(eq=False)
class Turn:
    """A ring's window moves on by one row."""

    ring: Buffer
    note: str = ""


Statement: TypeAlias = "Map | RowWise | Product | Gather | Push | Turn"


@dataclass
class Body:
    """All statements, and the memory that they need."""

    statements: list[Statement] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)


def reads(statement: Statement) -> Iterator[View]:
    """All that a statement reads."""
    match statement:
        case Map(expr=expr):
            yield from leaves(expr)
        case RowWise(src=src, weight=weight, bias=bias):
            yield from (v for v in (src, weight, bias) if v is not None)
        case Product(x=x, w=w, bias=bias, scales=scales, sums=sums):
            yield from (v for v in (x, w, bias, scales, sums) if v is not None)
        case Gather(table=table, index=index):
            yield from (table, index)
        case Push(src=src):
            yield src
        case Turn():
            return


def writes(statement: Statement) -> Buffer:
    """The buffer that it changes."""
    return statement.ring if isinstance(statement, (Push, Turn)) else statement.dst.buffer


__all__ = [
    "Body",
    "Call",
    "Gather",
    "Map",
    "Product",
    "Push",
    "RowKind",
    "RowWise",
    "Scalar",
    "Statement",
    "Turn",
    "reads",
    "writes",
]
