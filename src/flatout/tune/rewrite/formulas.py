"""Reading an expression as a formula: its operations are followed through names and casts, and anything else is no match."""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, TypeVar

import libcst as cst

from flatout.tune.rewrite.flow import (
    Expression,
    Flow,
    Operation,
    functional,
    without_casts,
    written_number,
    written_numbers,
)

Result = TypeVar("Result")


class NotThisFormula(Exception):
    """The expression is not the formula that is looked for."""


class Operands(NamedTuple):
    """An operation that was found: its bare name, its operands, and its other arguments by name."""

    name: str
    args: tuple[Expression, ...]
    options: dict[str, ast.expr]

    def option(self, name: str, place: int) -> ast.expr | None:
        """An argument of the operation, by its name or its position."""
        if name in self.options:
            return self.options[name]
        return self.args[place].node if place < len(self.args) else None

    @property
    def dims(self) -> tuple[float, ...]:
        """The dimensions that are reduced, as far as they are written out; () for all."""
        return written_numbers(self.option("dim", 1))

    @property
    def has_keepdim(self) -> bool:
        """Whether reduced dimensions stay, with size 1."""
        keep = self.option("keepdim", 3 if self.name == "var" else 2)
        return isinstance(keep, ast.Constant) and keep.value is True


class FormulaReading:
    """One attempt to read an expression as a formula; `removed` are the statements whose names it was followed through."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.removed: set[int] = set()

    def behind(self, expr: Expression, through: Container[str] = ()) -> Expression:
        """What an expression is behind casts, names that are not assigned under a condition, and operations `through`."""
        while True:
            expr = without_casts(self.flow, expr)
            operation = self.flow.operation(expr.node)
            if operation is not None and operation.name in through:
                expr = Expression(operation.args[0], expr.at)
                continue
            before = self.flow.written(expr)
            if before is None or isinstance(before.node, ast.IfExp):
                return expr
            self.removed.add(before.at)
            expr = before

    def here(self, expr: Expression, *names: str) -> Operands:
        """The operation of one of these names (of any, where none are passed) that the expression itself is."""
        operation = self.flow.operation(expr.node)
        if operation is None or not operation.args or (names and operation.name not in names):
            raise NotThisFormula
        args = tuple(Expression(a, expr.at) for a in operation.args)
        return Operands(operation.name, args, operation.options)

    def operation(self, expr: Expression, *names: str) -> Operands:
        """The operation of one of these names that the expression is, behind names."""
        return self.here(self.behind(expr), *names)

    def pair(self, expr: Expression, *names: str) -> tuple[Expression, Expression]:
        """The two operands of an operation of one of these names, behind names."""
        args = self.operation(expr, *names).args
        self.check(len(args) == 2)
        return args[0], args[1]

    def power(self, expr: Expression) -> tuple[Expression, float]:
        """A base and its exponent, for roots, written powers, `x * x` and one over these."""
        operation = self.operation(expr)
        base, *rest = operation.args
        second = written_number(rest[0].node) if rest else None
        if operation.name == "reciprocal" or (operation.name == "div" and written_number(base.node) == 1):
            inner, exponent = self.power(operation.args[-1])
            return inner, -exponent
        if operation.name == "pow" and second is not None:
            return base, second
        if operation.name == "mul" and rest and self.flow.same(base, rest[0]):
            return base, 2.0
        exponents = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0}
        self.check(operation.name in exponents)
        return base, exponents[operation.name]

    def factors(self, expr: Expression) -> list[tuple[Expression, int]]:
        """What is multiplied (1) and divided by (-1), through names."""
        found = self.maybe(lambda reading: reading.operation(expr, "mul", "div"))
        if found is None:
            return [(expr, 1)]
        left, right = found.args
        sign = 1 if found.name == "mul" else -1
        return self.factors(left) + [(factor, n * sign) for factor, n in self.factors(right)]

    def same(self, one: Expression, two: Expression) -> bool:
        """Whether both stand for one value, in whatever precision."""
        return self.flow.same(without_casts(self.flow, one), without_casts(self.flow, two))

    def first(self, attempts: Iterable[Callable[[FormulaReading], Result]]) -> Result:
        """The result of the first attempt that matches, each with a reading of its own."""
        for attempt in attempts:
            reading = FormulaReading(self.flow)
            try:
                result = attempt(reading)
            except NotThisFormula:
                continue
            self.removed |= reading.removed
            return result
        raise NotThisFormula

    def maybe(self, attempt: Callable[[FormulaReading], Result]) -> Result | None:
        """The result of an attempt; None where it does not match."""
        try:
            return self.first([attempt])
        except NotThisFormula:
            return None

    @staticmethod
    def check(is_it: bool) -> None:
        """Raise NotThisFormula unless the formula can still be this one."""
        if not is_it:
            raise NotThisFormula


def row_maximum(flow: Flow, node: ast.expr) -> Operation | None:
    """The operation of `x.max(dim)[0]`, `x.max(dim).values` and `x.amax(dim)`; None for anything else."""
    if isinstance(node, ast.Subscript) and written_number(node.slice) == 0:
        node = node.value
    operation = flow.operation(node)
    if operation is not None and operation.name == "values":
        operation = flow.operation(operation.args[0])
    return operation if operation is not None and operation.name in ("max", "amax") else None


def with_functional(reading: FormulaReading, last: Expression, new: str, *, reused: Sequence[Expression]) -> cst.Module:
    """Replace the expression as `Flow.replaced` does, with torch.nn.functional for '{F}' in `new`, imported where it is not."""
    flow = reading.flow
    module, prefix = functional(flow.module)
    changed = flow.replaced(last, new.replace("{F}", prefix), removed=reading.removed, reused=reused)
    return changed if module is flow.module else functional(changed)[0]
