"""Units that must stay or go together: one term a unit, tied by union-find.

A unit is one index of one dimension of a tensor. Its term is a tuple of variables, and the unit stays where all of them stay:
the empty term always stays (it is pinned), a channel is one variable, unit (h, d) of heads times head size is the term
(h, d). Tying two terms only ever adds conditions that are enough for both to be equal, so whatever is tied is right, at worst
too strict. A dimension is a list of terms; concatenating, slicing, permuting and reshaping are operations on lists.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

Term = tuple[int, ...]
Dim = list[Term]
PINNED: Term = ()


class UnitTerms:
    """All variables of a model, and what binds them; `because` tells why a pinned one is pinned."""

    def __init__(self) -> None:
        self._bound: list[Term | None] = []
        self.because: dict[int, str] = {}
        self._known: dict[int, tuple[int, Dim, list[Term], frozenset[int]]] = {}
        self._num_bound = 0
        self.now = ""
        """What is being tied: the reason of whatever is pinned."""

    def fresh(self, size: int) -> Dim:
        """A dimension of units that are free of one another. One of size 1 is pinned: nothing is left without it."""
        if size == 1:
            return [PINNED]
        first = len(self._bound)
        self._bound.extend([None] * size)
        return [(first + i,) for i in range(size)]

    def resolve(self, term: Term) -> Term:
        """The term in variables that nothing binds, each once, in order."""
        if len(term) == 1:
            return self._resolve_one(term[0])
        found: dict[int, None] = {}
        for variable in term:
            found.update(dict.fromkeys(self._resolve_one(variable)))
        return tuple(found)

    def _resolve_one(self, variable: int) -> Term:
        bound = self._bound[variable]
        if bound is None:
            return (variable,)
        if not bound:
            return PINNED
        end = self.resolve(bound)
        self._bound[variable] = end
        return end

    def pin(self, dim: Dim, why: str | None = None) -> None:
        """Keep all units of `dim`, for good."""
        for term in dim:
            self._pin(term, why)

    def _pin(self, term: Term, why: str | None = None) -> None:
        for variable in self.resolve(term):
            self.because.setdefault(variable, f"tied to a size that stays, by {self.now}" if why is None else why)
            self._set(variable, PINNED)

    def tie(self, one: Dim, other: Dim) -> None:
        """Unit by unit, each stays where the other stays."""
        if one is other:
            return
        if len(one) != len(other):  # not what the caller meant: nothing is known of either
            self.pin(one)
            self.pin(other)
            return
        for a, b in zip(one, other, strict=True):
            if a != b:
                self._tie(a, b)

    def _tie(self, one: Term, other: Term) -> None:
        a, b = self.resolve(one), self.resolve(other)
        if a == b:
            return
        if not a or not b:
            self._pin(a or b)
        elif len(a) == 1 and len(b) == 1:
            self._set(b[0], a)
        elif len(a) == 1 or len(b) == 1:
            self._bind(*((a[0], b) if len(a) == 1 else (b[0], a)))
        elif len(a) == len(b):
            for x, y in zip(a, b, strict=True):
                self._tie((x,), (y,))
        else:
            self._pin(a)
            self._pin(b)

    def _set(self, variable: int, term: Term) -> None:
        self._bound[variable] = term
        self._num_bound += 1

    def _bind(self, variable: int, term: Term) -> None:
        if variable not in term:
            self._set(variable, term)
            return
        # x = x and y holds where y stays for good.
        for other in term:
            if other != variable:
                self._pin((other,))

    def tie_inside(self, dim: Dim, num_parts: int) -> Dim:
        """Cut `dim` into equal parts whose i-th units stay or go together, so that they stay equal parts; the first part."""
        size = len(dim) // num_parts
        first = dim[:size]
        for part in range(1, num_parts):
            self.tie(first, dim[part * size : (part + 1) * size])
        return first

    def split(self, dim: Dim, sizes: Sequence[int]) -> list[Dim]:
        """The dimensions whose product `dim` is, the slowest first."""
        if len(sizes) == 1:
            return [dim]
        inner = len(dim) // sizes[0]
        rows, columns = self._split_two(dim, sizes[0], inner)
        return [rows, *self.split(columns, sizes[1:])]

    def _split_two(self, dim: Dim, num_rows: int, num_columns: int) -> tuple[Dim, Dim]:
        if num_rows == 1 or num_columns == 1:
            one: Dim = [PINNED]
            return (one, dim) if num_rows == 1 else (dim, one)
        found = [self.resolve(term) for term in dim]
        rows = [_shared(found[r * num_columns : (r + 1) * num_columns]) for r in range(num_rows)]
        columns = [_shared(found[c::num_columns]) for c in range(num_columns)]
        if all(set(t) == {*rows[i // num_columns], *columns[i % num_columns]} for i, t in enumerate(found)):
            return rows, columns
        rows, columns = self.fresh(num_rows), self.fresh(num_columns)
        for i, term in enumerate(found):
            self._tie(term, rows[i // num_columns] + columns[i % num_columns])
        return rows, columns

    def merge(self, dims: Sequence[Dim]) -> Dim:
        """The product of dimensions, the slowest first."""
        merged: Dim = [PINNED]
        for dim in dims:
            merged = dim if merged == [PINNED] else [_joined(a, b) for a in merged for b in dim]
        return merged

    def remaining(self, dim: Dim, removed: Collection[int]) -> list[int]:
        """The indexes of the units that stay."""
        found, variables = self._looked_up(dim)
        if variables.isdisjoint(removed):
            return list(range(len(dim)))
        gone = frozenset(removed)
        return [i for i, term in enumerate(found) if gone.isdisjoint(term)]

    def variables(self, dim: Dim) -> frozenset[int]:
        """Those that decide over `dim`."""
        return self._looked_up(dim)[1]

    def _looked_up(self, dim: Dim) -> tuple[list[Term], frozenset[int]]:
        """Resolved terms and all their variables, remembered until something is tied."""
        known = self._known.get(id(dim))
        if known is None or known[0] != self._num_bound:
            found = [self.resolve(term) for term in dim]
            # The dimension itself is held, so that no other one gets its identity.
            known = self._num_bound, dim, found, frozenset(v for term in found for v in term)
            self._known[id(dim)] = known
        return known[2], known[3]


def _joined(a: Term, b: Term) -> Term:
    return tuple(dict.fromkeys(a + b)) if a and b else a or b


def _shared(terms: Sequence[Term]) -> Term:
    """The variables that all have, in the order of the first."""
    rest = [set(term) for term in terms[1:]]
    return tuple(v for v in terms[0] if all(v in other for other in rest))
