"""Calls in a text, found by the full names of what they call, and with other arguments; all other formatting stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import libcst as cst

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.source import code_of, find, nodes_of, parsed, with_changes, with_expression

LOADER: Final = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
LOADER_ORDER: Final = (
    "dataset",
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
)
"""What DataLoader takes by position, as far as anyone does (signature in torch 2.11 to 2.13)."""
DDP: Final = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
)
DDP_ORDER: Final = (
    "module",
    "device_ids",
    "output_device",
    "dim",
    "broadcast_buffers",
    "init_sync",
    "process_group",
    "bucket_cap_mb",
)
_READERS: Final = frozenset({"get", "items", "keys", "values", "copy"})
Change: TypeAlias = "Callable[[cst.Call], cst.Call]"


def true_name() -> cst.Name:
    """The name True, as a value to write."""
    return cst.Name("True")


def calls_to(module: cst.Module, names: Sequence[str], *, inside: cst.CSTNode | None = None) -> list[cst.Call]:
    """All calls of these functions or classes, by their full names ('torch.optim.Adam'), in a node or the whole file."""
    return [call for call in nodes_of(cst.Call, inside or module) if call_name(module, call.func) in names]


def call_in(text: str, parameters: Parameters, names: Sequence[str]) -> tuple[cst.Module, cst.Call]:
    """The one call of these functions in the statement that the parameters name; in the text when they name none.

    Raises EditError when there is none, or more than one.
    """
    place = find(text, parameters) if "code" in parameters else None
    module = place.module if place is not None else parsed(text)
    calls = calls_to(module, names, inside=place.statement if place is not None else None)
    short = names[0].rpartition(".")[2]
    if len(calls) != 1:
        raise EditError(f"no {short} is made there" if not calls else f"{len(calls)} calls make a {short}")
    return module, calls[0]


def compiles_models(module: cst.Module) -> bool:
    """Whether a file names torch.compile, or a method `compile` of anything but the module `re`."""
    named = [a for a in nodes_of(cst.Attribute, module) if a.attr.value == "compile"]
    plain = [n for n in nodes_of(cst.Name, module) if n.value == "compile" and call_name(module, n) == "torch.compile"]
    return bool(plain) or any(call_name(module, a) not in ("re.compile", "regex.compile") for a in named)


def calls_ending(node: cst.CSTNode, name: str) -> list[cst.Call]:
    """All calls in a node of a method of this name."""
    return [c for c in nodes_of(cst.Call, node) if isinstance(c.func, cst.Attribute) and c.func.attr.value == name]


def with_calls(module: cst.Module, calls: Sequence[cst.Call], change: Change) -> cst.Module:
    """The tree with these calls (by identity) changed, also where one is inside another."""
    return with_changes(module, dict.fromkeys(calls, change))


def keyword_argument(call: cst.Call, keyword: str) -> cst.BaseExpression | None:
    """Value of a call's keyword argument; None when it is missing, or inside `**options`."""
    return next((a.value for a in call.args if _is_for(a, keyword)), None)


def argument(call: cst.Call, keyword: str, position: int | None = None) -> cst.BaseExpression | None:
    """Value of a call's argument, by keyword or by position; None when it is missing.

    Raises EditError when it gives arguments that cannot be read from the text (`*args`, `**options`).
    """
    starred = next((a for a in call.args if a.star), None)
    if starred is not None:
        raise EditError(f"'{starred.star}{code_of(starred.value)}' may hold '{keyword}'")
    return next((a.value for i, a in enumerate(call.args) if _is_for(a, keyword, i == position)), None)


def _is_for(arg: cst.Arg, keyword: str, is_at_position: bool = False) -> bool:
    return arg.keyword.value == keyword if arg.keyword is not None else is_at_position


def with_keywords(
    module: cst.Module, call: cst.Call, values: Mapping[str, str | None], order: Sequence[str]
) -> cst.Module:
    """The tree with the call's keywords set to these expressions, or taken out (None). `order` are its positional parameters.

    Raises EditError where an argument is given by position or comes out of `**`.
    """
    if any(a.star for a in call.args):
        raise EditError(f"arguments of {code_of(call.func)} are unpacked from elsewhere")
    num_positional = sum(a.keyword is None for a in call.args)
    new = call
    for name, value in values.items():
        if name in order[:num_positional]:
            raise EditError(f"'{name}' is passed by position")
        new = without_argument(new, name) if value is None else with_argument(new, name, cst.parse_expression(value))
    return with_expression(module, call, new)


def with_argument(call: cst.Call, keyword: str, value: cst.BaseExpression) -> cst.Call:
    """The call with a keyword argument: in its place when it is there, else at the end, formatted as the last one is."""
    args = list(call.args)
    at = next((i for i, a in enumerate(args) if _is_for(a, keyword)), None)
    if at is not None:
        args[at] = args[at].with_changes(value=value)
        return call.with_changes(args=args)
    plain = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    new = cst.Arg(value, keyword=cst.Name(keyword), equal=plain)
    if args:
        last = args[-1]
        before = args[-2].comma if len(args) > 1 else call.whitespace_before_args
        space = before.whitespace_after if isinstance(before, cst.Comma) else before
        if not isinstance(space, cst.ParenthesizedWhitespace):
            space = cst.SimpleWhitespace(" ")
        new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        args[-1] = last.with_changes(
            comma=cst.Comma(whitespace_after=space), whitespace_after_arg=cst.SimpleWhitespace("")
        )
    return call.with_changes(args=[*args, new])


def without_argument(call: cst.Call, keyword: str, position: int | None = None) -> cst.Call:
    """The call without the argument for a parameter."""
    args = [arg for i, arg in enumerate(call.args) if not _is_for(arg, keyword, i == position)]
    if args and args[-1] is not (last := call.args[-1]):
        args[-1] = args[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    return call.with_changes(args=args)


def is_named(node: cst.CSTNode | None, *names: str) -> bool:
    """Whether an expression is one of these names ('True', 'None')."""
    return isinstance(node, cst.Name) and node.value in names


class Unpacked(NamedTuple):
    """Keywords that come out of `**options`: all values that the text has for them, and which are there in any case."""

    values: Mapping[str, tuple[cst.BaseExpression, ...]]
    certain: frozenset[str]


def unpacked(scope: cst.CSTNode, call: cst.Call) -> Unpacked:
    """What a call may get out of `**options`, from the text of a scope.

    Raises EditError where that is not plain: `options` must be a name that is only assigned, updated with, unpacked and read by
    methods, from dictionaries that are written out.
    """
    starred = [a for a in call.args if a.star]
    if not starred:
        return Unpacked({}, frozenset())
    if len(starred) > 1 or starred[0].star != "**" or not isinstance(starred[0].value, cst.Name):
        raise EditError(f"it cannot be told what '{starred[0].star}{code_of(starred[0].value)}' may hold")
    return _dictionary(scope, starred[0].value.value, ())


def _dictionary(scope: cst.CSTNode, name: str, inside: tuple[str, ...]) -> Unpacked:
    """The dictionary of this name, from all assignments and updates."""
    problem = EditError(f"it cannot be told what '**{name}' may hold")
    assigned = [a.value for a in nodes_of(cst.Assign, scope) for t in a.targets if is_named(t.target, name)]
    updates = [c for c in calls_ending(scope, "update") if len(c.args) == 1 and not c.args[0].star]
    own = [c.args[0].value for c in updates if is_named(cst.ensure_type(c.func, cst.Attribute).value, name)]
    num_read = sum(a.star == "**" and is_named(a.value, name) for a in nodes_of(cst.Arg, scope))
    num_read += sum(is_named(c.args[0].value, name) for c in updates)
    num_read += sum(_reads_entries(call.func, name) for call in nodes_of(cst.Call, scope))
    changing = [*nodes_of(cst.AssignTarget, scope), *nodes_of(cst.AugAssign, scope), *nodes_of(cst.Del, scope)]
    changed = {id(one) for part in changing for one in nodes_of(cst.Subscript, part)}
    num_read += sum(is_named(one.value, name) for one in nodes_of(cst.Subscript, scope) if id(one) not in changed)
    num_known = len(assigned) + len(own) + num_read
    if not assigned or name in inside or num_known != sum(n.value == name for n in nodes_of(cst.Name, scope)):
        raise problem
    first = [_written_out(scope, source, (*inside, name), problem) for source in assigned]
    later = [_written_out(scope, source, (*inside, name), problem) for source in own]
    return Unpacked(_together([*first, *later]), frozenset.intersection(*(one.certain for one in first)))


def _reads_entries(func: cst.BaseExpression, name: str) -> bool:
    """Whether what is called reads entries of this dictionary and changes none: `options.get`."""
    return isinstance(func, cst.Attribute) and func.attr.value in _READERS and is_named(func.value, name)


def _written_out(
    scope: cst.CSTNode, source: cst.BaseExpression, inside: tuple[str, ...], problem: EditError
) -> Unpacked:
    """A dictionary that an expression makes."""
    if isinstance(source, cst.Name):
        return _dictionary(scope, source.value, inside)
    if isinstance(source, cst.IfExp):
        sides = [_written_out(scope, side, inside, problem) for side in (source.body, source.orelse)]
        return Unpacked(_together(sides), sides[0].certain & sides[1].certain)
    pairs: dict[str, tuple[cst.BaseExpression, ...]] = {}
    if isinstance(source, cst.Call) and is_named(source.func, "dict"):
        for arg in source.args:
            if arg.keyword is None:
                raise problem
            pairs[arg.keyword.value] = (arg.value,)
    elif isinstance(source, cst.Dict):
        for element in source.elements:
            if not isinstance(element, cst.DictElement) or not isinstance(element.key, cst.SimpleString):
                raise problem
            pairs[str(element.key.evaluated_value)] = (element.value,)
    else:
        raise problem
    return Unpacked(pairs, frozenset(pairs))


def _together(parts: Sequence[Unpacked]) -> dict[str, tuple[cst.BaseExpression, ...]]:
    found: dict[str, tuple[cst.BaseExpression, ...]] = {}
    for part in parts:
        for key, values in part.values.items():
            found[key] = (*found.get(key, ()), *values)
    return found
