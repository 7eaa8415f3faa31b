"""Lifting of a loop's statements: what an iteration computes, and which results leave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.tune.rewrite.enclosing_blocks import is_skip, occurrences
from flatout.tune.rewrite.loop_lifting import LiftedValue, Lifter
from flatout.tune.rewrite.operands import atom, inverted
from flatout.tune.rewrite.source import assigned_in, code_of, expression, statements

How = Literal["append", "add", "subtract", "max", "min", "put", "count", "scatter"]


class Result(NamedTuple):
    """A result of an iteration: `value` goes to `target` where `condition` holds, at `keys` for 'count' and 'scatter'."""

    how: How
    target: cst.BaseExpression
    value: LiftedValue
    keys: tuple[cst.BaseExpression, ...] = ()
    condition: cst.BaseExpression | None = None


def assignment_targets(body: Sequence[cst.CSTNode], local: set[str]) -> frozenset[str]:
    """Targets that the body binds, adds to, appends to or writes into: all that may go from one iteration to the next."""
    found = set(assigned_in(body)) - local
    for node in (
        n for one in body for n in m.findall(one, m.AugAssign() | m.AssignTarget(m.Subscript() | m.Attribute()))
    ):
        target = node.target  # type: ignore[attr-defined]
        found |= {code_of(target)} | ({code_of(target.value)} if isinstance(target, cst.Subscript) else set())
    for call in (c for one in body for c in m.findall(one, m.Call(func=m.Attribute(attr=m.Name("append"))))):
        found.add(code_of(call.func.value))  # type: ignore[attr-defined]
    return frozenset(found)


class BodyLifter:
    """Lifts statements one after the other; `results` are what leaves the iteration."""

    def __init__(self, lifter: Lifter, *, counter: str) -> None:
        self.results: list[Result] = []
        self._lifter = lifter
        self._counter = counter

    def lift(self, block: Sequence[cst.CSTNode], condition: cst.BaseExpression | None = None) -> None:
        """Lift all statements of a block, where `condition` holds.

        Raises EditError at one that does more than compute and hand over.
        """
        for n, statement in enumerate(block):
            if isinstance(statement, cst.SimpleStatementLine):
                for small in statement.body:
                    self._small(small, condition)
            elif isinstance(statement, cst.If):
                if is_skip(statement):
                    test = self._tested(statement.test)
                    self.lift(block[n + 1 :], _both(condition, inverted(test)))
                    return
                self._branches(statement, condition)
            else:
                raise EditError(f"'{code_of(statement).splitlines()[0]}' is inside the loop")

    def _small(self, small: cst.BaseSmallStatement, condition: cst.BaseExpression | None) -> None:
        if isinstance(small, cst.Pass) or (isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString)):
            return
        if isinstance(small, cst.Assign) and len(small.targets) == 1:
            self._assign(small.targets[0].target, small.value, condition)
        elif isinstance(small, cst.AnnAssign) and small.value is not None:
            self._assign(small.target, small.value, condition)
        elif isinstance(small, cst.AugAssign):
            self._increase(small, condition)
        elif m.matches(
            small, m.Expr(m.Call(func=m.Attribute(attr=m.Name("append")), args=[m.Arg(keyword=None, star="")]))
        ):
            call = small.value  # type: ignore[attr-defined]
            value = self._lifter.plain(call.args[0].value)
            self.results.append(Result("append", call.func.value, value, condition=condition))
        else:
            raise EditError(f"'{code_of(small)}' does more than compute")

    def _assign(
        self, target: cst.BaseExpression, value: cst.BaseExpression, condition: cst.BaseExpression | None
    ) -> None:
        lifter = self._lifter
        if isinstance(target, cst.Subscript):
            self._put(target, value, condition)
            return
        running = _running(target, value)
        if running is not None and code_of(target) in lifter.carried and code_of(target) not in lifter.names:
            how, part = running
            self.results.append(Result(how, target, lifter.plain(part), condition=condition))
            return
        if (
            isinstance(target, cst.Tuple)
            and isinstance(value, cst.Tuple)
            and len(target.elements) == len(value.elements)
        ):
            names = {code_of(e.value) for e in target.elements}
            if any(occurrences(value, n) for n in names):
                raise EditError(f"'{code_of(target)}' are assigned to and read at once")
            for one, other in zip(target.elements, value.elements, strict=True):
                self._assign(one.value, other.value, condition)
            return
        if isinstance(target, cst.Tuple) and all(isinstance(e.value, cst.Name) for e in target.elements):
            self._unpack(target, lifter.plain(value), condition)
            return
        if not isinstance(target, cst.Name):
            raise EditError(f"'{code_of(target)}' is written in the loop")
        new = lifter.lift(value)
        old = lifter.names.get(target.value)
        if condition is not None and old is not None:
            if new.mask is not None or old.mask is not None:
                raise EditError(f"'{target.value}' has as many rows as were selected")
            selected = lifter.where(condition, new.node, old.node)
            new = LiftedValue(
                selected,
                is_batched=True,
                is_number=new.is_number and old.is_number,
                is_mask=new.is_mask and old.is_mask,
            )
        lifter.bind(target.value, new)

    def _unpack(self, target: cst.Tuple, value: LiftedValue, condition: cst.BaseExpression | None) -> None:
        names = [code_of(e.value) for e in target.elements]
        if condition is not None and any(n in self._lifter.names for n in names):
            raise EditError(f"'{code_of(target)}' is written under a condition")
        self._lifter.statements += statements("{t} = {v}\n", t=target, v=value.node)
        for name in names:
            self._lifter.names[name] = LiftedValue(
                cst.Name(name), is_batched=value.is_batched, is_number=value.is_number
            )

    def _increase(self, small: cst.AugAssign, condition: cst.BaseExpression | None) -> None:
        lifter, target = self._lifter, small.target
        operator = {cst.AddAssign: "+", cst.SubtractAssign: "-"}.get(type(small.operator))
        if isinstance(target, cst.Name) and target.value in lifter.names:
            sign = code_of(small.operator).rstrip("=")
            self._assign(target, expression(f"{{t}} {sign} {{v}}", t=target, v=atom(small.value)), condition)
            return
        if operator is None:
            raise EditError(f"'{code_of(small)}' is no sum")
        if isinstance(target, cst.Subscript):
            keys = [lifter.plain(e.slice.value) if isinstance(e.slice, cst.Index) else None for e in target.slice]
            if any(k is None or k.is_batched for k in keys):
                self._count(small, target, keys, condition, operator)
                return
        value = lifter.plain(small.value)
        self.results.append(Result("add" if operator == "+" else "subtract", target, value, condition=condition))

    def _count(
        self,
        small: cst.AugAssign,
        target: cst.Subscript,
        keys: Sequence[LiftedValue | None],
        condition: cst.BaseExpression | None,
        operator: str,
    ) -> None:
        """Lift a count at a key, such as `counts[label] += 1`."""
        if operator != "+" or None in keys:
            raise EditError(f"'{code_of(small)}' is no sum at a key")
        of = tuple(k.node for k in keys if k is not None)
        value = self._lifter.plain(small.value)
        is_one = code_of(small.value) == "1"
        if len(of) == 1 and is_one and not isinstance(target.value, cst.Subscript):
            self.results.append(Result("count", target.value, value, keys=of, condition=condition))
            return
        if condition is not None or not isinstance(target.value, (cst.Name, cst.Attribute)):
            raise EditError(f"'{code_of(small)}' is no sum at a key")
        self.results.append(Result("scatter", target.value, value, keys=of))

    def _put(self, target: cst.Subscript, value: cst.BaseExpression, condition: cst.BaseExpression | None) -> None:
        """Lift an assignment at the iteration's number, such as `out[i] = ...`."""
        at = [n for n, e in enumerate(target.slice) if code_of(e.slice) == self._counter and self._counter]
        rest = [e for n, e in enumerate(target.slice) if n not in at]
        local = set(self._lifter.names)
        is_outer = isinstance(target.value, (cst.Name, cst.Attribute)) and code_of(target.value) not in local
        if len(at) != 1 or condition is not None or not is_outer or any(occurrences(rest, n) for n in local):
            raise EditError(f"'{code_of(target)}' is written in the loop")
        if at[0] > 0 and (at[0] > 1 or code_of(target.slice[0].slice) != ":"):
            raise EditError(f"'{code_of(target)}' is written in the loop")
        self.results.append(Result("put", target, self._lifter.plain(value)))

    def _tested(self, test: cst.BaseExpression) -> cst.BaseExpression:
        value = self._lifter.plain(test)
        if not value.is_batched:
            raise EditError(f"'{code_of(test)}' decides what the loop does")
        if not value.is_mask:
            return expression("{x} != 0", x=atom(value.node))
        return value.node

    def _branches(self, statement: cst.If, condition: cst.BaseExpression | None) -> None:
        test = self._tested(statement.test)
        uses = len(statement.body.body) + (statement.orelse is not None)
        if uses > 1 and not isinstance(test, cst.Name):
            test = self._lifter.named(test, "is_so")
        start = len(self.results)
        self._block(statement.body, _both(condition, test))
        middle = len(self.results)
        if isinstance(statement.orelse, cst.Else):
            self._block(statement.orelse.body, _both(condition, inverted(test)))
        elif isinstance(statement.orelse, cst.If):
            self._branches(statement.orelse, _both(condition, inverted(test)))
        self._merge(start, middle, test, condition)

    def _merge(self, start: int, middle: int, test: cst.BaseExpression, condition: cst.BaseExpression | None) -> None:
        """What each branch appends to one list is one thing that is appended."""
        ones, others = self.results[start:middle], self.results[middle:]
        for one in (r for r in ones if r.how == "append"):
            same = [r for r in others if r.how == "append" and code_of(r.target) == code_of(one.target)]
            other_condition = code_of(_both(condition, inverted(test)))
            if len(same) != 1 or same[0].condition is None or code_of(same[0].condition) != other_condition:
                continue
            two = same[0]
            value = self._lifter.where(test, one.value.node, two.value.node)
            is_number = all(v.is_number or not v.is_batched for v in (one.value, two.value))
            merged = Result(
                "append", one.target, LiftedValue(value, is_batched=True, is_number=is_number), condition=condition
            )
            self.results = [merged if r is one else r for r in self.results if r is not two]

    def _block(self, suite: cst.BaseSuite, condition: cst.BaseExpression) -> None:
        self.lift(statements_of(suite), condition)


def statements_of(suite: cst.BaseSuite) -> Sequence[cst.BaseStatement]:
    """The statements of a block, or those behind the colon of a line."""
    if isinstance(suite, cst.IndentedBlock):
        return suite.body
    assert isinstance(suite, cst.SimpleStatementSuite)
    return [cst.SimpleStatementLine(suite.body)]


def _running(target: cst.BaseExpression, value: cst.BaseExpression) -> tuple[How, cst.BaseExpression] | None:
    """`s = s + x` and `best = max(best, x)`: how, and x."""
    code = code_of(target)
    steps = (cst.Add, cst.Subtract)
    if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, steps) and code_of(value.left) == code:
        return ("add" if isinstance(value.operator, cst.Add) else "subtract"), value.right
    if isinstance(value, cst.Call) and code_of(value.func) in ("max", "min") and len(value.args) == 2:
        parts = [a.value for a in value.args]
        others = [p for p in parts if code_of(p) != code]
        if len(others) == 1:
            return ("max" if code_of(value.func) == "max" else "min"), others[0]
    return None


def _both(one: cst.BaseExpression | None, two: cst.BaseExpression) -> cst.BaseExpression:
    return two if one is None else expression("{a} & {b}", a=atom(one), b=atom(two))
