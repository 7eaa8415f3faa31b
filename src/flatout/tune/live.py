"""Applies a plan's levers to objects that exist already: a model, an optimizer, a loader, in a user's or a framework's loop.

Each lever uses the same hooks that a script has. A model and an optimizer stay the objects they are; a loader cannot be changed
after its construction, so that a new one replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from flatout.core.records.lever import Lever
from flatout.core.records.plan import Plan
from flatout.core.registry import lever_of
from flatout.tune.script_hooks import CallHooks, ConstructorChange, Undo, call_through

_FUSED_ATTRIBUTES: Final = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""Attributes that only fused optimizers have (torch 2.11 to 2.13)."""

Model = TypeVar("Model", bound="nn.Module | None")
Optimizer = TypeVar("Optimizer", bound="torch.optim.Optimizer | None")


class NotApplied(NamedTuple):
    """A lever of the plan that could not be applied to the objects at hand, and why."""

    lever: str
    because: str


class Applied(Generic[Model, Optimizer]):
    """Levers applied until `undo`, or until the end of a `with`; use its `model`, `optimizer` and `loader` from here on.

    `applied` are the ids of the levers that took effect, `not_applied` the others, each with its reason.
    """

    def __init__(self, plan: Plan, model: Model, optimizer: Optimizer, loader: DataLoader[Any] | None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loader = loader
        self.applied: tuple[str, ...] = ()
        self.not_applied: tuple[NotApplied, ...] = ()
        self._loader_before = loader
        self._hooks: list[LiveHooks] = []
        self._undo_wrapping: Callable[[], None] = lambda: None
        try:
            for planned in plan.lever:
                self._apply(lever_of(planned.id), planned.parameters)
            if model is not None:
                self._undo_wrapping = _wrapped_calls(model, self._hooks)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Undo all levers, last first; calling it again does nothing."""
        self._undo_wrapping()
        self._undo_wrapping = lambda: None
        while self._hooks:
            self._hooks.pop().remove()
        self.loader = self._loader_before

    def __enter__(self) -> Applied[Model, Optimizer]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.undo()

    def _apply(self, lever: Lever, parameters: dict[str, Any]) -> None:
        if lever.apply is None:
            because = "it changes the text of the script; `flatout edit` prints the change"
            self.not_applied += (NotApplied(lever.id, because),)
            return
        hooks = LiveHooks(self.model, self.optimizer, self.loader)
        try:
            lever.apply(hooks, parameters)
        except BaseException:
            hooks.remove()
            raise
        if hooks.has_effect:
            self._hooks.append(hooks)
            self.loader = hooks.loader
            self.applied += (lever.id,)
            return
        hooks.remove()
        wanted = lever.environment(parameters) if lever.environment is not None else {}
        variables = " ".join(f"{name}={value}" for name, value in wanted.items())
        because = (
            f"it needs {variables} before the process starts" if variables else f"it found nothing {self._places()}"
        )
        self.not_applied += (NotApplied(lever.id, because),)

    def _places(self) -> str:
        objects = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        names = [name for name, value in objects.items() if value is not None]
        return f"to change in the {', '.join(names)}" if names else "because there is no model, optimizer or loader"


class LiveHooks(CallHooks):
    """The Hooks of one lever on objects that exist already: its changes are made at once."""

    def __init__(
        self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, loader: DataLoader[Any] | None
    ) -> None:
        super().__init__()
        self.loader = loader
        self._model = model
        self._optimizer = optimizer
        self._is_noted = False
        self._is_for_objects = False

    @property
    def has_effect(self) -> bool:
        """Whether the lever has changed an object, or something that will be called."""
        is_around = self._model is not None and bool(self.contexts or self.inputs or self.outputs)
        return self._is_noted or (not self._is_for_objects and (self.has_replaced or is_around))

    def at_start(self, change: Callable[[], Undo]) -> None:
        """Make the change now: there is no earlier point."""
        self._undo.append(change())

    def at_construction(self, kind: type, change: ConstructorChange) -> None:
        """Construct the optimizer or the loader again if it is of this kind and the change asks for other arguments."""
        self._is_for_objects = True
        optimizer = self._optimizer
        if (
            optimizer is not None
            and isinstance(optimizer, kind)
            and type(optimizer).__module__.startswith("torch.optim")
        ):
            self._undo.append(_change_optimizer(optimizer, change))
        if type(self.loader) is DataLoader and issubclass(DataLoader, kind):
            arguments = _loader_arguments(self.loader)
            before = dict(arguments)
            change(DataLoader, arguments)
            if _changes(before, arguments):
                self.loader = DataLoader(**arguments)

    def at_first_call(self, change: Callable[[nn.Module], Undo | None]) -> None:
        """Make the change to the model now."""
        self._is_for_objects = True
        undo = change(self._model) if self._model is not None else None
        if undo is not None:
            self._undo.append(undo)

    def at_source(self, file: str, change: Callable[[str], str]) -> None:
        """Do nothing: the text was compiled before the lever came."""
        self._is_for_objects = True

    def note(self, what: str) -> None:
        """Record that the lever has really changed something."""
        self._is_noted = True


def _wrapped_calls(model: nn.Module, levers: Sequence[LiveHooks]) -> Callable[[], None]:
    """Pass calls of the model through the levers' contexts and changes; returns how to undo it.

    The wrapper is where `nn.Module.compile` puts its own: it is looked up at every call, and copies and pickles leave it out.
    """
    levers = [hooks for hooks in levers if hooks.contexts or hooks.inputs or hooks.outputs or hooks.calls]
    if not levers:
        return lambda: None
    before = model._compiled_call_impl
    call: Callable[..., Any] = before if before is not None else model._call_impl

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call_through(levers, model, call, args, kwargs)

    model._compiled_call_impl = wrapped
    return partial(setattr, model, "_compiled_call_impl", before)


def _change_optimizer(optimizer: torch.optim.Optimizer, change: ConstructorChange) -> Callable[[], None]:
    """Give an optimizer the arguments that `change` asks for; its state and hooks stay. Returns how to undo it."""
    arguments = _optimizer_arguments(optimizer)
    before = dict(arguments)
    change(type(optimizer), arguments)
    names = _changes(before, arguments) - {"params"}
    if not names:
        return lambda: None
    _reconstruct(optimizer, arguments, names)
    return lambda: _reconstruct(optimizer, _optimizer_arguments(optimizer) | {n: before.get(n) for n in names}, names)


def _reconstruct(optimizer: torch.optim.Optimizer, arguments: dict[str, Any], names: set[str]) -> None:
    """Give an optimizer the attributes of a new one with these arguments and its own state."""
    fresh = type(optimizer)(**arguments)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group.update({name: arguments[name] for name in names})
    fresh.load_state_dict(state)
    for mine, its in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        mine.update(its)
    gone = [name for name in vars(optimizer) if name not in vars(fresh) and name in _FUSED_ATTRIBUTES]
    vars(optimizer).update({n: v for n, v in vars(fresh).items() if n != "param_groups" and not n.endswith("_hooks")})
    for name in gone:
        delattr(optimizer, name)


def _optimizer_arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Arguments that construct this optimizer again, in groups that name only what differs from the defaults."""
    from inspect import signature

    known = signature(type(optimizer).__init__).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    groups = [
        {
            name: value
            for name, value in group.items()
            if name == "params" or name not in optimizer.defaults or _differs(value, optimizer.defaults[name])
        }
        for group in optimizer.param_groups
    ]
    return {"params": groups, **defaults}


def _loader_arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """Arguments that construct this loader again."""
    names = (
        "num_workers",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "in_order",
    )
    arguments = {name: getattr(loader, name) for name in names}
    arguments |= {"dataset": loader.dataset, "persistent_workers": loader.persistent_workers}
    if loader.num_workers:
        arguments["prefetch_factor"] = loader.prefetch_factor
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is None or loader.collate_fn is not default_collate:
        arguments["collate_fn"] = loader.collate_fn
    if isinstance(loader.dataset, IterableDataset):
        return arguments | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if batches is None:
        return arguments | {"batch_size": None, "sampler": sampler}
    if type(batches) is not BatchSampler:
        return arguments | {"batch_sampler": batches}
    arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if type(sampler) is SequentialSampler:
        return arguments
    is_usual = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    if is_usual and isinstance(sampler, RandomSampler) and sampler.generator is loader.generator:
        return arguments | {"shuffle": True}
    return arguments | {"sampler": sampler}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    names = before.keys() | after.keys()
    return {name for name in names if _differs(before.get(name), after.get(name))}


def _differs(one: object, two: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        return one is not two
    return one is not two and one != two
