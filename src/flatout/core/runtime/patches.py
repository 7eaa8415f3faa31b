"""Replacing attributes, modules' forwards and torch's attention for a time, and putting every one back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import getitem
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

Undo = Callable[[], None]

_ABSENT: Final = object()


class Patches:
    """Attributes replaced, in order. `undo` restores each, also those that were inherited and not there themselves."""

    _live: ClassVar[list[Patches]] = []
    """Those with something replaced now, in the order in which they began."""

    def __init__(self) -> None:
        self._done: list[tuple[object, str, object]] = []
        self._ours: dict[tuple[int, str], object] = {}

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace `owner.name` by `value` until `undo`."""
        _fill_torchs_caches(owner)
        if not self._done:
            self._live.append(self)
        self._done.append((owner, name, vars(owner).get(name, _ABSENT)))
        self._ours[id(owner), name] = value
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore all, last first. Calling it again does nothing."""
        if self._done:
            self._live.remove(self)
        while self._done:
            owner, name, before = self._done.pop()
            _restore(owner, name, before)

    def lift(self, owner: object, name: str) -> Undo:
        """Put back what was `owner.name` before it was replaced here, until the function that is returned is called.

        Nothing is done where something else has replaced it since.
        """
        before, ours = next(b for o, n, b in self._done if o is owner and n == name), self._ours.get((id(owner), name))
        if vars(owner).get(name, _ABSENT) is not ours:
            return lambda: None
        _restore(owner, name, before)

        def replace_again() -> None:
            if vars(owner).get(name, _ABSENT) is before:
                setattr(owner, name, ours)

        return replace_again

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        now = [(owner, name, before, vars(owner).get(name, _ABSENT)) for owner, name, before in self._done]
        for owner, name, before, _ in reversed(now):
            _restore(owner, name, before)
        try:
            yield
        finally:
            for owner, name, _, value in now:
                _restore(owner, name, value)


@contextmanager
def all_suspended() -> Iterator[None]:
    """Everything that any Patches replaced as it was before, for the time of the context."""
    with ExitStack() as stack:
        for patches in reversed(Patches._live):
            stack.enter_context(patches._suspended())
        yield


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Replace `module.forward` on this instance alone, for as long as its owner wants.

    Copies of the module (`copy.deepcopy`, `pickle`, `torch.save`) have the forward that was there before: the new one knows this
    instance, and would compute with its parameters. Unlike Patches this is no observation: `all_suspended` leaves it in place.

    Returns:
        What restores the forward that was there, the instance's own or the class's. It does nothing when it is called again,
        and where something else has replaced the forward since.
    """
    before = vars(module).get("forward", _ABSENT)
    ours = _OfOneInstance(forward, module, before)
    module.forward = ours

    def undo() -> None:
        if vars(module).get("forward") is ours:
            _restore(module, "forward", before)

    return undo


def replaced_forward(module: nn.Module) -> object:
    """What `replace_forward` put in the place of this instance's forward last; None where that is its class's."""
    forward = vars(module).get("forward")
    return forward.forward if isinstance(forward, _OfOneInstance) else forward


class _OfOneInstance:
    """A forward of one module, which its copies do not get."""

    def __init__(self, forward: Callable[..., Any], module: nn.Module, before: object) -> None:
        self.forward = forward
        self._module = module
        self._before = before
        self.__wrapped__ = module.forward
        """Whose signature `inspect` finds."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._before is _ABSENT:
            return getattr, (self._module, "forward")  # of the copy, which has none of its own yet: the class's
        return getitem, ((self._before,), 0)


def set_attributes(owner: object, **values: object) -> Undo:
    """Set attributes until the function that is returned is called; unlike with Patches, the owner may compute them."""
    before = {name: getattr(owner, name) for name in values}

    def restore(values: dict[str, object]) -> None:
        for name, value in values.items():
            setattr(owner, name, value)

    restore(values)
    return lambda: restore(before)


class AttentionCall(NamedTuple):
    """The arguments of one call of `torch.nn.functional.scaled_dot_product_attention`, with torch's names and defaults."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def run(self, attention: Callable[..., Tensor]) -> Tensor:
        """Call `attention`, which takes torch's arguments, with these."""
        query, key, value, *_ = self
        return attention(query, key, value, **{name: getattr(self, name) for name in self._fields[3:]})


def attention_function(replacement: Callable[[AttentionCall], Tensor]) -> Callable[..., Tensor]:
    """A function with the signature of torch's scaled_dot_product_attention that hands each call to `replacement`."""

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        return replacement(AttentionCall(*args, **kwargs))

    return scaled_dot_product_attention


def _fill_torchs_caches(owner: object) -> None:
    """Let torch note which of its functions make tensors while they are its own.

    `torch.device` as a context knows them by identity, from a list that is made once: made with a function of ours in place of
    `torch.tensor`, it would let `torch.tensor` ignore the context for the rest of the process, and transformers, which asks that
    way whether a model is on the meta device, would leave its buffers unset.
    """
    if owner is sys.modules.get("torch"):
        from torch.utils._device import _device_constructors

        _device_constructors()


def _restore(owner: object, name: str, before: object) -> None:
    if before is not _ABSENT:
        setattr(owner, name, before)
    elif name in vars(owner):
        delattr(owner, name)
