"""The body of one iteration as a formula for torch.vmap: no host reads, no branches of Python, no selected rows.

What is read to the host stays a tensor, conditions become torch.where, and rows chosen by a mask or up to a length are
reduced with the others masked out, as shapes must not depend on values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.runtime.torch_functions import is_in_place, is_pointwise, is_random
from flatout.tune.rewrite.calls import with_argument
from flatout.tune.rewrite.enclosing_blocks import root_name
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.operands import (
    all_rows,
    as_operand,
    atom,
    inverted,
    last_name,
    reduced_where,
    reduction_dim,
    subscripted,
    width_of,
)
from flatout.tune.rewrite.source import code_of, expression, free_name, names_in, nodes_of, statements, word_set

_EFFECTS: Final = word_set(
    "next input open read readline print perf_counter time append extend pop insert backward step zero_grad write"
)
"""Calls whose result differs each time, or that have an effect outside of the iteration."""
_MUTATING: Final = word_set(
    "append extend add update insert pop remove clear write backward step zero_grad set put send close setdefault"
)
"""Methods that change what they are called on, unless it is a tensor of the iteration ('add', 'update')."""
_SHAPE: Final = frozenset(("shape", "dtype", "device", "ndim", "requires_grad"))
_BOOLEAN: Final = word_set("eq ne lt le gt ge bool isnan isfinite isinf isneginf isposinf signbit logical_not")
"""Functions of tensors that return booleans."""
_REDUCTIONS: Final = word_set("sum mean max min amax amin any all logsumexp prod norm numel")
"""Reductions that `reduced_where` can write with the other rows masked out."""
_LOSSES: Final = word_set(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
    "cross_entropy nll_loss"
)
"""Losses that can be asked for one value per row, and are then averaged over the selected rows."""
_NEEDS_VALUES: Final = word_set(
    "tolist numpy nonzero unique index_select masked_select split chunk backward argwhere bincount"
)
_MATHS: Final = word_set("sqrt exp log log2 log10 log1p sin cos tan tanh floor ceil pow atan2 erf fabs")
"""Functions of `math` that torch has by the same name, or nearly."""
_PYTHON: Final = word_set(
    "print isinstance str list dict set tuple sorted min max sum any all range enumerate zip map filter repr "
    "format open divmod iter"
)


def is_spelt_mask(text: str) -> bool:
    """Whether a name or expression sounds like that of a boolean tensor."""
    return any(word in text.lower() for word in ("mask", "valid", "keep"))


class LiftedValue(NamedTuple):
    """An expression, with whether it differs by iteration, is a number that was read, is boolean, or rows that `mask`
    selects.
    """

    node: cst.BaseExpression
    is_batched: bool = False
    is_number: bool = False
    is_mask: bool = False
    mask: cst.BaseExpression | None = None
    group: RowGroup | None = None


class RowGroup(NamedTuple):
    """A sum or mean of the rows of a tensor whose owner is the iteration's number."""

    owner: cst.BaseExpression
    rows: cst.BaseExpression
    how: str
    is_by_row: bool


class Lifter:
    """Turns expressions of a loop's body into ones for all iterations; `names` are the values of its names."""

    def __init__(
        self,
        module: cst.Module,
        torch: str,
        names: dict[str, LiftedValue],
        *,
        counter: str = "",
        carried: frozenset[str] = frozenset(),
        fixed: frozenset[str] = frozenset(),
    ) -> None:
        self.names = names
        self.carried = carried
        self._fixed = fixed
        self.statements: list[cst.BaseStatement] = []
        self._module = module
        self._torch = torch
        self._counter = counter
        self._taken = names_in(module)
        self._named: dict[str, cst.Name] = {}

    # -- names of the iteration -------------------------------------------------------------------------------------------

    def bind(self, name: str, value: LiftedValue) -> None:
        """Assign a value to a name of the body."""
        self._named.clear()
        if value.mask is not None:
            node = value.node if isinstance(value.node, (cst.Name, cst.Attribute)) else self.named(value.node, name)
            self.names[name] = value._replace(node=node, mask=self.named(value.mask, f"{name}_mask"))
            return
        if isinstance(value.node, cst.Name) and value.node.value in self._fixed and name not in self.names:
            self.names[name] = value
            return
        self.statements += statements("{name} = {value}\n", name=cst.Name(name), value=value.node)
        self.names[name] = value._replace(node=cst.Name(name))

    def named(self, node: cst.BaseExpression, wanted: str) -> cst.BaseExpression:
        """A name for an expression that is needed twice."""
        if isinstance(node, cst.Name):
            return node
        known = self._named.get(code_of(node))
        if known is not None:
            return known
        wanted = free_name(wanted, self._taken)
        self._taken.add(wanted)
        self.statements += statements("{name} = {value}\n", name=cst.Name(wanted), value=node)
        self._named[code_of(node)] = cst.Name(wanted)
        return cst.Name(wanted)

    def where(
        self, condition: cst.BaseExpression, one: cst.BaseExpression, two: cst.BaseExpression
    ) -> cst.BaseExpression:
        """A call of torch.where with these three operands."""
        return expression(f"{self._torch}.where({{c}}, {{a}}, {{b}})", c=condition, a=one, b=two)

    # -- expressions ------------------------------------------------------------------------------------------------------

    def lift(self, node: cst.BaseExpression) -> LiftedValue:
        """The expression's value for all iterations at once.

        Raises EditError when it needs a value on the host, or something that cannot be seen through.
        """
        if code_of(node) in self.carried and code_of(node) not in self.names:
            raise EditError(f"'{code_of(node)}' goes from one iteration to the next")
        if isinstance(node, cst.Name):
            return self.names.get(node.value, LiftedValue(node))
        for kind, lift in _lifts().items():
            if isinstance(node, kind):
                return lift(self, node)
        if names_in(node) & (set(self.names) | self.carried):
            raise EditError(f"'{code_of(node)}' is more than arithmetic")
        if m.findall(node, m.Await() | m.Yield() | m.NamedExpr()):
            raise EditError(f"'{code_of(node)}' is more than a value")
        self._check_calls(node)
        return LiftedValue(node)

    def plain(self, node: cst.BaseExpression) -> LiftedValue:
        """The expression's value for all iterations, where selected rows are not allowed."""
        value = self.lift(node)
        if value.mask is not None:
            raise EditError(f"'{code_of(node)}' has as many rows as were selected")
        return value

    def _check_calls(self, node: cst.CSTNode) -> None:
        for call in nodes_of(cst.Call, node):
            self._check_call(call)

    def _check_call(self, call: cst.Call) -> None:
        name = last_name(call.func)
        if name in _EFFECTS or is_random(name):
            raise EditError(f"'{code_of(call.func)}' does something of its own in each iteration")
        if is_in_place(name):
            raise EditError(f"'{code_of(call.func)}' changes a tensor in place")

    def _attribute(self, node: cst.Attribute) -> LiftedValue:
        value = self.lift(node.value)
        if not value.is_batched:
            return LiftedValue(node)
        if value.mask is not None:
            raise EditError(f"'{code_of(node)}' is of as many rows as were selected")
        changed = node.with_changes(value=atom(value.node))
        return LiftedValue(changed, is_batched=node.attr.value not in _SHAPE)

    def _subscript(self, node: cst.Subscript) -> LiftedValue:
        if isinstance(node.value, cst.Attribute) and code_of(node).endswith(".shape[0]"):
            shaped = self.lift(node.value.value)
            if shaped.mask is not None:
                return self._number_of(shaped.mask)
        base = self.lift(node.value)
        if base.mask is not None:
            return self._of_selected(node, base)
        indices = [self._index(e) for e in node.slice]
        if not base.is_batched and not any(i.is_batched for i in indices):
            return LiftedValue(node)
        if base.is_number:
            raise EditError(f"'{code_of(node)}' is no tensor's")
        bounded = next((n for n, e in enumerate(node.slice) if self._is_open(e)), None)
        if bounded is not None:
            return self._up_to(node, base, indices, bounded)
        if indices[0].is_mask and indices[0].is_batched:
            mask = cst.ensure_type(indices[0].node, cst.Index).value
            rest = tuple(e.with_changes(slice=i.node) for e, i in zip(node.slice[1:], indices[1:], strict=True))
            rows = base.node if not rest else subscripted(base.node, (all_rows(), *rest))
            return LiftedValue(rows, is_batched=True, is_mask=base.is_mask, mask=mask)
        slices = [e.with_changes(slice=i.node) for e, i in zip(node.slice, indices, strict=True)]
        is_mask = base.is_mask or is_spelt_mask(root_name(node.value))
        return LiftedValue(node.with_changes(value=atom(base.node), slice=slices), is_batched=True, is_mask=is_mask)

    def _of_selected(self, node: cst.Subscript, base: LiftedValue) -> LiftedValue:
        first = node.slice[0].slice
        is_all = isinstance(first, cst.Slice) and first.lower is None and first.upper is None
        if not is_all or names_in(node.slice) & set(self.names):
            raise EditError(f"'{code_of(node)}' takes of as many rows as were selected")
        return base._replace(node=subscripted(base.node, tuple(node.slice)))

    def _index(self, element: cst.SubscriptElement) -> LiftedValue:  # node is a BaseSlice
        part = element.slice
        if isinstance(part, cst.Index):
            value = self.plain(part.value)
            return value._replace(node=part.with_changes(value=value.node))  # type: ignore[arg-type]
        assert isinstance(part, cst.Slice)
        bounds = [self.plain(b) if b is not None else None for b in (part.lower, part.upper, part.step)]
        if not any(b is not None and b.is_batched for b in bounds):
            return LiftedValue(part)  # type: ignore[arg-type]
        low, high, step = bounds
        width = width_of(part)
        if low is not None and high is not None and step is None and width is not None:
            if names_in(width) & set(self.names):
                raise EditError(f"'{code_of(part)}' has another length in each iteration")
            node = expression(f"{{a}} + {self._torch}.arange({{w}})", a=atom(low.node), w=width)
            return LiftedValue(cst.Index(node), is_batched=True)  # type: ignore[arg-type]
        if step is not None or (low is not None and high is not None):
            raise EditError(f"'{code_of(part)}' has another length in each iteration")
        return LiftedValue(part, is_batched=True)  # type: ignore[arg-type]

    def _is_open(self, element: cst.SubscriptElement) -> bool:
        part = element.slice
        if not isinstance(part, cst.Slice) or (part.lower is not None and part.upper is not None):
            return False
        return any(b is not None and self.lift(b).is_batched for b in (part.lower, part.upper))

    def _up_to(self, node: cst.Subscript, base: LiftedValue, indices: Sequence[LiftedValue], at: int) -> LiftedValue:
        """`x[i, :n]`: the rows of x[i] whose number is below n."""
        part = node.slice[at].slice
        assert isinstance(part, cst.Slice)
        before, after = node.slice[:at], node.slice[at + 1 :]
        if any(not isinstance(e.slice, cst.Index) for e in before) or names_in(after) & set(self.names):
            raise EditError(f"'{code_of(node)}' has another length in each iteration")
        picked = [
            e.with_changes(slice=i.node, comma=cst.MaybeSentinel.DEFAULT) for e, i in zip(before, indices, strict=False)
        ]
        rows = subscripted(base.node, picked) if picked else base.node
        if not isinstance(rows, cst.Name):
            rows = self.named(rows, "rows")
        bound = part.upper if part.upper is not None else part.lower
        assert bound is not None
        operator = "<" if part.upper is not None else ">="
        positions = f"{self._torch}.arange(len({{rows}}), device={{rows}}.device) {operator} {{bound}}"
        mask = expression(positions, rows=rows, bound=atom(self.plain(bound).node))
        if after:
            rows = subscripted(rows, (all_rows(), *after))
        return LiftedValue(rows, is_batched=True, is_mask=base.is_mask, mask=mask)

    def _binary(self, node: cst.BinaryOperation) -> LiftedValue:
        left, right = self.lift(node.left), self.lift(node.right)
        is_mask = left.is_mask and right.is_mask and isinstance(node.operator, (cst.BitAnd, cst.BitOr, cst.BitXor))
        changed = node.with_changes(left=as_operand(left.node, node.left), right=as_operand(right.node, node.right))
        return self._joined(node, changed, (left, right), is_mask=is_mask)

    def _unary(self, node: cst.UnaryOperation) -> LiftedValue:
        value = self.lift(node.expression)
        if not value.is_batched:
            return LiftedValue(node)
        if isinstance(node.operator, cst.Not):
            return value._replace(node=inverted(value.node), is_mask=True, group=None)
        return value._replace(node=node.with_changes(expression=atom(value.node)), group=None)

    def _boolean(self, node: cst.BooleanOperation) -> LiftedValue:
        left, right = self.lift(node.left), self.lift(node.right)
        if not left.is_batched and not right.is_batched:
            return LiftedValue(node)
        operator = "&" if isinstance(node.operator, cst.And) else "|"
        joined = expression(f"{{a}} {operator} {{b}}", a=atom(left.node), b=atom(right.node))
        return self._joined(node, joined, (left, right), is_mask=True)

    def _comparison(self, node: cst.Comparison) -> LiftedValue:
        first = node.comparisons[0]
        if isinstance(first.operator, (cst.In, cst.NotIn)) and len(node.comparisons) == 1:
            return self._contains(node, first)
        values = [self.lift(node.left), *(self.lift(c.comparator) for c in node.comparisons)]
        if not any(v.is_batched for v in values):
            return LiftedValue(node)
        if any(isinstance(c.operator, (cst.Is, cst.IsNot, cst.In, cst.NotIn)) for c in node.comparisons):
            raise EditError(f"'{code_of(node)}' asks for more than a tensor's values")
        parts: list[cst.BaseExpression] = []
        for n, target in enumerate(node.comparisons):
            one = as_operand(values[n].node, node.left if n == 0 else node.comparisons[n - 1].comparator)
            other = target.with_changes(comparator=as_operand(values[n + 1].node, target.comparator))
            parts.append(cst.Comparison(left=one, comparisons=[other]))
        joined = parts[0].with_changes(lpar=node.lpar, rpar=node.rpar) if len(parts) == 1 else None
        for part in parts[1:]:
            joined = expression("{a} & {b}", a=atom(joined or parts[0]), b=atom(part))
        assert joined is not None
        return self._joined(node, joined, values, is_mask=True)

    def _contains(self, node: cst.Comparison, target: cst.ComparisonTarget) -> LiftedValue:
        """`label in row.topk(3).indices.tolist()`."""
        among = target.comparator
        if m.matches(among, m.Call(func=m.Attribute(attr=m.Name("tolist")), args=[])):
            among = among.func.value  # type: ignore[attr-defined]
        one, other = self.plain(node.left), self.plain(among)
        if not one.is_batched and not other.is_batched:
            return LiftedValue(node)
        if other.is_number or (not other.is_batched and not isinstance(among, (cst.Name, cst.Attribute))):
            raise EditError(f"'{code_of(node)}' looks into something that is no tensor")
        found = expression("({other} == {one}).any()", other=atom(other.node), one=atom(one.node))
        found = found if isinstance(target.operator, cst.In) else inverted(found)
        return LiftedValue(found, is_batched=True, is_number=True, is_mask=True)

    def _conditional(self, node: cst.IfExp) -> LiftedValue:
        test, one, two = self.plain(node.test), self.lift(node.body), self.lift(node.orelse)
        if not test.is_batched:
            changed = node.with_changes(body=as_operand(one.node, node.body), orelse=as_operand(two.node, node.orelse))
            return self._joined(node, changed, (one, two), is_mask=one.is_mask and two.is_mask)
        if one.mask is not None or two.mask is not None:
            raise EditError(f"'{code_of(node)}' has as many rows as were selected")
        literals = (cst.Integer, cst.Float, cst.UnaryOperation)
        is_number = all(v.is_number or isinstance(v.node, literals) for v in (one, two))
        return LiftedValue(self.where(test.node, one.node, two.node), is_batched=True, is_number=is_number)

    def _sequence(self, node: cst.Tuple | cst.List) -> LiftedValue:
        values = [self.plain(e.value) for e in node.elements]
        if not any(v.is_batched for v in values):
            return LiftedValue(node)
        elements = [e.with_changes(value=v.node) for e, v in zip(node.elements, values, strict=True)]
        return LiftedValue(node.with_changes(elements=elements), is_batched=True)

    def _mapping(self, node: cst.Dict) -> LiftedValue:
        parts = [e for e in node.elements if isinstance(e, cst.DictElement)]
        values = [self.plain(e.value) for e in parts]
        if len(parts) < len(node.elements) or any(names_in(e.key) & set(self.names) for e in parts):
            raise EditError(f"'{code_of(node)}' is more than arithmetic")
        elements = [e.with_changes(value=v.node) for e, v in zip(parts, values, strict=True)]
        return LiftedValue(node.with_changes(elements=elements), is_batched=any(v.is_batched for v in values))

    def _joined(
        self, old: cst.BaseExpression, new: cst.BaseExpression, values: Sequence[LiftedValue], *, is_mask: bool = False
    ) -> LiftedValue:
        """An operation on elements: of chosen rows where one of its operands is."""
        if not any(v.is_batched for v in values):
            return LiftedValue(old)
        masks = {code_of(v.mask): v.mask for v in values if v.mask is not None}
        if len(masks) > 1:
            raise EditError(f"'{code_of(old)}' brings together rows selected by different masks")
        numbers = all(v.is_number or not v.is_batched for v in values)
        return LiftedValue(
            new, is_batched=True, is_number=numbers, is_mask=is_mask, mask=next(iter(masks.values()), None)
        )

    # -- calls ------------------------------------------------------------------------------------------------------------

    def _call(self, node: cst.Call) -> LiftedValue:
        self._check_call(node)
        if root_name(node.func) in self.names and isinstance(node.func, cst.Name):
            raise EditError(f"'{code_of(node.func)}' is another function in each iteration")
        full, name = call_name(self._module, node.func), last_name(node.func)
        owner = self.lift(node.func.value) if isinstance(node.func, cst.Attribute) and not full else None
        if owner is not None and owner.mask is not None:
            return self._of_rows(node, name, owner, node.args)
        if node.args and node.args[0].keyword is None and not node.args[0].star:
            first = self.lift(node.args[0].value)
            if first.mask is not None and name == "len" and not full:
                return self._number_of(first.mask)
            if first.mask is not None and full.startswith("torch.") and name not in _LOSSES:
                return self._of_rows(node, name, first, node.args[1:])
        args = [self.lift(a.value) for a in node.args]
        if not any(v.is_batched for v in (*args, *((owner,) if owner else ()))):
            return LiftedValue(node)
        if full.startswith("torch.nn.functional.") and name in _LOSSES and any(v.mask is not None for v in args):
            return self._loss_of_rows(node, args)
        if any(v.mask is not None for v in args):
            raise EditError(f"'{code_of(node)}' needs as many rows as were selected")
        return self._plain_call(node, full, name, owner, args)

    def _plain_call(
        self, node: cst.Call, full: str, name: str, owner: LiftedValue | None, args: Sequence[LiftedValue]
    ) -> LiftedValue:
        first = args[0] if args else None
        if owner is not None and owner.is_batched:
            if name == "item" and not args:
                return owner._replace(is_number=True, group=None)
            if name in _NEEDS_VALUES:
                raise EditError(f"'{code_of(node)}' needs values on the host")
        elif owner is not None and name in _MUTATING:
            raise EditError(f"'{code_of(node.func)}' does something of its own in each iteration")
        if isinstance(node.func, cst.Name) and not full and first is not None:
            if name in ("float", "int", "bool") and len(args) == 1:
                cast = {"float": "{x}.float()", "int": "{x}.long()", "bool": "{x}.bool()"}[name]
                keeps = first.is_mask if name == "bool" else (first.is_number and not first.is_mask) or name == "float"
                keeps = keeps and not (name == "float" and first.is_mask)
                value = first.node if keeps else expression(cast, x=atom(first.node))
                return LiftedValue(value, is_batched=True, is_number=True, is_mask=name == "bool")
            if name == "len":
                return LiftedValue(node.with_changes(args=_with_values(node.args, args)))
            if name in _PYTHON:
                raise EditError(f"'{name}' needs values on the host")
        if full.startswith("math.") and name in _MATHS:
            func = cst.parse_expression(f"{self._torch}.{'abs' if name == 'fabs' else name}")
            return LiftedValue(cst.Call(func=func, args=_with_values(node.args, args)), is_batched=True, is_number=True)
        if full.partition(".")[0] in ("math", "numpy", "random"):
            raise EditError(f"'{code_of(node.func)}' needs values on the host")
        if full == "torch.tensor" and first is not None and len(args) == 1 and not isinstance(first.node, cst.List):
            return first._replace(is_number=False)
        if full in ("torch.tensor", "torch.nonzero", "torch.unique", "torch.masked_select", "torch.bincount"):
            raise EditError(f"'{code_of(node.func)}' needs values on the host")
        func = node.func
        if owner is not None and isinstance(func, cst.Attribute) and owner.is_batched:
            func = func.with_changes(value=atom(owner.node))
        is_shape = owner is not None and owner.is_batched and name in ("size", "dim", "numel")
        changed = node.with_changes(func=func, args=_with_values(node.args, args))
        return LiftedValue(changed, is_batched=not is_shape, is_mask=name in _BOOLEAN or name.startswith("logical_"))

    def _number_of(self, mask: cst.BaseExpression) -> LiftedValue:
        return LiftedValue(expression("{mask}.sum()", mask=atom(mask)), is_batched=True, is_number=True)

    def _of_rows(self, node: cst.Call, name: str, rows: LiftedValue, rest: Sequence[cst.Arg]) -> LiftedValue:
        """A function of chosen rows: their reduction with the others masked out, or of each element."""
        if is_pointwise(name):
            others = [self.lift(a.value) for a in rest]
            for other in others:
                self._joined(node, node, (rows, other))
            args = _with_values(rest, others)
            changed = cst.Call(func=cst.Attribute(atom(rows.node), cst.Name(name)), args=args)
            if not isinstance(node.func, cst.Attribute) or call_name(self._module, node.func):
                changed = node.with_changes(args=[node.args[0].with_changes(value=rows.node), *args])
            return rows._replace(node=changed, is_mask=name in _BOOLEAN)
        if name == "size" and len(rest) == 1 and code_of(rest[0].value) == "0" and rows.mask is not None:
            return self._number_of(rows.mask)
        if name not in _REDUCTIONS:
            raise EditError(f"'{name}' needs as many rows as were selected")
        return self._reduced(name, rows, reduction_dim(name, rest))

    def _reduced(self, name: str, rows: LiftedValue, dim: str | None) -> LiftedValue:
        mask = rows.mask
        assert mask is not None
        if dim not in (None, "0", "-1"):
            raise EditError(f"the selected rows are reduced along dimension {dim}")
        is_by_row = dim == "0"
        group = self._group_of(name, rows, mask, is_by_row=is_by_row)
        is_product = is_by_row and name in ("sum", "mean") and not rows.is_mask
        if name == "mean" or is_product:
            mask = self.named(mask, "chosen")
        value = self.named(rows.node, "rows") if is_product else rows.node
        reduced = reduced_where(name, value, mask, torch=self._torch, is_by_row=is_by_row, is_mask=rows.is_mask)
        return LiftedValue(reduced, is_batched=True, group=group)

    def _group_of(self, name: str, rows: LiftedValue, mask: cst.BaseExpression, *, is_by_row: bool) -> RowGroup | None:
        """Rows chosen by `owner == i`, the same rows and owners in each iteration."""
        if name not in ("sum", "mean") or not isinstance(mask, (cst.Comparison, cst.Name)):
            return None
        known = next((v for k, v in self.names.items() if isinstance(mask, cst.Name) and k == mask.value), None)
        mask = self._comparison_of(mask.value) if known is not None else mask  # type: ignore[union-attr,assignment]
        if not isinstance(mask, cst.Comparison) or not self._counter:
            return None
        sides = (mask.left, mask.comparisons[0].comparator)
        if len(mask.comparisons) > 1 or not isinstance(mask.comparisons[0].operator, cst.Equal):
            return None
        owner = next((s for s, t in (sides, sides[::-1]) if code_of(t) == self._counter), None)
        if owner is None or names_in([owner, rows.node]) & set(self.names):
            return None
        return RowGroup(owner, rows.node, name, is_by_row)

    def _comparison_of(self, name: str) -> cst.BaseExpression | None:
        for line in self.statements:
            found = m.extract(
                line,
                m.SimpleStatementLine(
                    [m.Assign([m.AssignTarget(m.Name(name))], m.SaveMatchedNode(m.Comparison(), "c"))]
                ),
            )
            if found is not None:
                return found["c"]  # type: ignore[return-value]
        return None

    def _loss_of_rows(self, node: cst.Call, args: Sequence[LiftedValue]) -> LiftedValue:
        """`F.mse_loss(x[mask], y[mask])`: its mean over the chosen rows."""
        keywords = {a.keyword.value for a in node.args if a.keyword is not None}
        if keywords & {"reduction", "weight"} or len(args) > 2:
            raise EditError(f"'{code_of(node)}' needs as many rows as were selected")
        by_row = node.with_changes(args=_with_values(node.args, args))
        changed = with_argument(by_row, "reduction", cst.SimpleString('"none"'))
        return self._reduced("mean", self._joined(node, changed, args), None)


def _lift_comprehension(lifter: Lifter, node: cst.BaseExpression) -> LiftedValue:
    if names_in(node) & (set(lifter.names) | lifter.carried):
        raise EditError(f"'{code_of(node)}' is a loop of its own")
    lifter._check_calls(node)
    return LiftedValue(node)


@cache
def _lifts() -> Mapping[type[cst.CSTNode], Callable[..., LiftedValue]]:
    """What lifts each kind of expression."""
    return {
        cst.Attribute: Lifter._attribute,
        cst.Subscript: Lifter._subscript,
        cst.BinaryOperation: Lifter._binary,
        cst.UnaryOperation: Lifter._unary,
        cst.BooleanOperation: Lifter._boolean,
        cst.Comparison: Lifter._comparison,
        cst.IfExp: Lifter._conditional,
        cst.Tuple: Lifter._sequence,
        cst.List: Lifter._sequence,
        cst.Dict: Lifter._mapping,
        cst.Call: Lifter._call,
        cst.ListComp: _lift_comprehension,
        cst.GeneratorExp: _lift_comprehension,
        cst.SetComp: _lift_comprehension,
        cst.DictComp: _lift_comprehension,
    }


def _with_values(args: Sequence[cst.Arg], values: Sequence[LiftedValue]) -> list[cst.Arg]:
    return [a.with_changes(value=v.node) for a, v in zip(args, values, strict=True)]
