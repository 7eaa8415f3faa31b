"""Kinds of operators, and which compute: by what torch's dispatcher has registered for them, not by a list of names."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, Literal

import torch

Kind = Literal["kernel", "foreign", "composite", "none"]

_NO_WORK: Final = (
    "aten::empty", "aten::new_empty", "aten::_empty", "aten::resize", "aten::set_", "aten::record_stream", "aten::_efficientzero",
    "aten::_has_", "aten::lift_fresh", "aten::_unsafe_view",
)  # fmt: skip
"""They make or move memory, and write no number: the beginnings of their names."""
_SKIPPED_NAMESPACES: Final = ("profiler", "prim", "prims_helper", "rngprims_helper")


@cache
def operator_kind(name: str, overload: str = "") -> Kind:
    """What an operator of the tape is, by its name ('aten::add') and overload ('' also where none was recorded).

    - 'kernel': it computes or copies: one operator, whatever it is made of inside.
    - 'foreign': it belongs to another library, and may be made of operators that are seen themselves.
    - 'composite': torch makes it of other operators for every device (`aten::linear`); those count, it does not. So do a copy
      below `aten::contiguous` or `aten::to`, which otherwise return what they were given.
    - 'none': it makes a view, makes memory, tells a number to Python, or is no operator at all.

    >>> operator_kind("aten::mul", "Tensor"), operator_kind("aten::linear"), operator_kind("aten::view")
    ('kernel', 'composite', 'none')
    >>> operator_kind("aten::empty", "memory_format")
    'none'
    """
    namespace, found, _ = name.partition("::")
    if not found or namespace in _SKIPPED_NAMESPACES or name.startswith(_NO_WORK):
        return "none"
    schemas = _schemas(name, overload)
    if not schemas:
        return "none"
    if all(_is_view(s) or not _gives_tensors(s) for s in schemas) or _changes_a_view(name):
        return "none"
    if any(_is_composite(s) for s in schemas):
        return "composite"
    return "kernel" if namespace == "aten" else "foreign"


def is_computing(name: str, overload: str) -> bool:
    """Whether a dispatched operator counts as one that was run."""
    return operator_kind(name, overload) in ("kernel", "foreign")


def _schemas(name: str, overload: str) -> list[Any]:
    """The schemas that may be meant; of an operator without recorded overload all."""
    known: list[Any] = torch._C._jit_get_schemas_for_operator(name)
    found = [
        s for s in known if torch._C._dispatch_has_kernel(_full(s))
    ]  # TorchScript's own on lists and numbers have none
    exact = [s for s in found if s.overload_name == overload]
    return exact or found


def _is_composite(schema: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(_full(schema), "CompositeImplicitAutograd"))


def _full(schema: Any) -> str:
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def _is_view(schema: Any) -> bool:
    """Whether the result shares its memory with an argument that is not written to."""
    return any(a.alias_info is not None and not a.alias_info.is_write for a in schema.returns)


def _changes_a_view(name: str) -> bool:
    """Whether a tensor is made to look at its memory in another way, in place (`aten::t_`); torch has a tag for that."""
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base)
    return any(torch.Tag.inplace_view in getattr(packet, overload).tags for overload in packet.overloads())


def _gives_tensors(schema: Any) -> bool:
    """Whether a tensor is returned or written to."""
    is_returned = any("Tensor" in str(r.type) for r in schema.returns)
    return is_returned or any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
