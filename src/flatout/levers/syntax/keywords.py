"""Keyword arguments of one call in a text, set or taken out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import libcst as cst
from libcst import matchers as m

from flatout.errors import EditError
from flatout.levers.syntax.source import call_name, code_of, find, parsed, with_expression
from flatout.records.lever import Parameters

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


def call_in(text: str, parameters: Parameters, names: Sequence[str]) -> tuple[cst.Module, cst.Call]:
    """The one call of these (full names, by the file's imports) in the statement that the parameters name, or in the text.

    Raises EditError when there is none, or more than one.
    """
    if "code" in parameters:
        place = find(text, parameters)
        module = place.module
        where: cst.CSTNode = place.statement
    else:
        where = module = parsed(text)
    calls = [c for c in m.findall(where, m.Call()) if isinstance(c, cst.Call) and call_name(module, c.func) in names]
    short = names[0].rpartition(".")[2]
    if len(calls) != 1:
        raise EditError(f"no {short} is made there" if not calls else f"{len(calls)} calls make a {short}")
    return module, calls[0]


def argument(call: cst.Call, name: str) -> cst.BaseExpression | None:
    """The value of a keyword argument; None where it is not given by keyword."""
    return next((a.value for a in call.args if a.keyword is not None and a.keyword.value == name), None)


def with_keywords(
    module: cst.Module, call: cst.Call, values: Mapping[str, str | None], order: Sequence[str]
) -> cst.Module:
    """The tree with the call's keywords set to these expressions, or taken out (None). `order` are its positional parameters.

    Raises EditError where an argument is given by position or comes out of `**`.
    """
    num_positional = sum(a.keyword is None and not a.star for a in call.args)
    if any(a.star for a in call.args):
        raise EditError(f"arguments of {code_of(call.func)} are unpacked from elsewhere")
    args = list(call.args)
    for name, value in values.items():
        if name in order[:num_positional]:
            raise EditError(f"'{name}' is given by position")
        index = next((i for i, a in enumerate(args) if a.keyword is not None and a.keyword.value == name), None)
        if value is None:
            if index is not None:
                _take_out(args, index)
        elif index is not None:
            args[index] = args[index].with_changes(value=cst.parse_expression(value))
        else:
            _put_last(args, name, value)
    return with_expression(module, call, call.with_changes(args=args))


def _put_last(args: list[cst.Arg], name: str, value: str) -> None:
    new = cst.Arg(
        keyword=cst.Name(name),
        value=cst.parse_expression(value),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    if args:
        last = args[-1]
        between = args[-2].comma if len(args) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        args[-1] = last.with_changes(comma=between, whitespace_after_arg=cst.SimpleWhitespace(""))
    args.append(new)


def _take_out(args: list[cst.Arg], index: int) -> None:
    gone = args.pop(index)
    if args and index == len(args):
        args[-1] = args[-1].with_changes(comma=gone.comma, whitespace_after_arg=gone.whitespace_after_arg)
