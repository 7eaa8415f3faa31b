"""What functions of torch do, by their bare name: draw random numbers, work element by element, return views, write in place.

The answers come from torch's own operator tags and schemas, one name at a time, at the first question. Lists are here only for
what torch's operators do not know: functions of Python and of torch.nn.functional, and where a tag says more than is meant.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch._ops import OpOverload

_RANDOM: Final = frozenset((
    "choice", "choices", "dropout1d", "dropout2d", "dropout3d", "gumbel_softmax", "integers", "permutation", "rsample",
    "sample", "shuffle", "standard_normal",
))  # fmt: skip
"""Functions of torch.nn.functional, torch.distributions, random and numpy.random that draw random numbers."""
_RANDOM_WITH_DROPOUT: Final = frozenset(("scaled_dot_product_attention", "gru", "lstm", "rnn_relu", "rnn_tanh"))
"""Tagged as random by torch, but only with dropout, which their callers seldom ask for: not counted as random here."""
_POINTWISE: Final = frozenset(("cpu", "detach", "double", "float", "half", "int", "logsigmoid", "long", "to"))
"""Methods that change no element's place but are no pointwise operators, and a Python function around one."""
_VIEWS: Final = frozenset(("as_tensor", "asarray", "broadcast_to", "from_numpy", "ravel"))
"""Functions of torch and numpy that may return memory of their input and are no operators, or do not say so."""


def is_random(name: str) -> bool:
    """Whether a function of this name draws random numbers: one of torch, of Python's `random` or of `numpy.random`.

    >>> is_random("randn_like"), is_random("dropout"), is_random("relu")
    (True, True, False)
    """
    if name in _RANDOM_WITH_DROPOUT:
        return False
    return name in _RANDOM or any("nondeterministic_seeded" in _tags(o) for o in _overloads(name))


def is_pointwise(name: str) -> bool:
    """Whether a function of this name maps each element of its first argument, its only tensor, by itself to a new tensor.

    >>> is_pointwise("sigmoid"), is_pointwise("softmax"), is_pointwise("add_")
    (True, False, False)
    """
    return name in _POINTWISE or any(map(_is_pointwise, _overloads(name)))


def is_view(name: str) -> bool:
    """Whether what a function of this name returns may share memory with its input.

    >>> is_view("transpose"), is_view("reshape"), is_view("clone")
    (True, True, False)
    """
    return name in _VIEWS or any(
        r.alias_info is not None and not r.alias_info.is_write for o in _overloads(name) for r in o._schema.returns
    )


def is_in_place(name: str) -> bool:
    """Whether a method of this name writes to its tensor, as torch marks it by the underscore at the end.

    >>> is_in_place("add_"), is_in_place("add"), is_in_place("__setattr__")
    (True, False, False)
    """
    return name.endswith("_") and not name.endswith("__")


def _is_pointwise(overload: OpOverload) -> bool:
    schema, tags = overload._schema, _tags(overload)
    tensors = [n for n, argument in enumerate(schema.arguments) if "Tensor" in str(argument.type)]
    is_new = not schema.is_mutable and [str(r.type) for r in schema.returns] == ["Tensor"]
    return "pointwise" in tags and "nondeterministic_seeded" not in tags and tensors == [0] and is_new


def _tags(overload: OpOverload) -> frozenset[str]:
    return frozenset(tag.name for tag in overload.tags)


@cache
def _overloads(name: str) -> tuple[OpOverload, ...]:
    """Torch's operators of this name; () where there is none."""
    import torch

    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return ()
    return tuple(getattr(packet, overload) for overload in packet.overloads())
