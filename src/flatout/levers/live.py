"""A plan's levers pulled on objects that exist already: a model, an optimizer, a loader, in a loop of one's own or a framework's.

Each lever is told of them by the same seams that a script has. A model and an optimizer stay the objects they are; a loader
cannot be changed once it is made, so that there is a new one in its stead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
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

from flatout.levers.seams import Making, Undo
from flatout.profiling.patching import Patches
from flatout.records.lever import Lever
from flatout.records.plan import Plan
from flatout.registry import lever_of

_MARKS: Final = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""What fused optimizers set on themselves and others have not (torch 2.11 to 2.13)."""

Model = TypeVar("Model", bound="nn.Module | None")
Optimizer = TypeVar("Optimizer", bound="torch.optim.Optimizer | None")


class NotApplied(NamedTuple):
    """A lever of the plan that could not be pulled on what was given, and why."""

    lever: str
    because: str


class Applied(Generic[Model, Optimizer]):
    """Levers that are pulled until `undo`, or the end of a `with`. Use `model`, `optimizer` and `loader` from here on."""

    def __init__(self, plan: Plan, model: Model, optimizer: Optimizer, loader: DataLoader[Any] | None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loader = loader
        self.applied: tuple[str, ...] = ()
        self.not_applied: tuple[NotApplied, ...] = ()
        self._loader_before = loader
        self._pulled: list[LiveSeams] = []
        self._undo_wrapping: Callable[[], None] = lambda: None
        try:
            for planned in plan.lever:
                self._pull(lever_of(planned.id), planned.parameters)
            if model is not None:
                self._undo_wrapping = _wrapped_calls(model, self._pulled)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Make all as it was before, last first. Calling it again does nothing."""
        self._undo_wrapping()
        self._undo_wrapping = lambda: None
        while self._pulled:
            self._pulled.pop().undo()
        self.loader = self._loader_before

    def __enter__(self) -> Applied[Model, Optimizer]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.undo()

    def _pull(self, lever: Lever, parameters: dict[str, Any]) -> None:
        if lever.apply is None:
            because = (
                "it changes the text of the script; `flatout edit` prints the change"
                if lever.reduction is None
                else "it makes another model of the one that is there; `flatout shrink` does"
            )
            self.not_applied += (NotApplied(lever.id, because),)
            return
        seams = LiveSeams(self.model, self.optimizer, self.loader)
        try:
            lever.apply(seams, parameters)
        except BaseException:
            seams.undo()
            raise
        if seams.has_effect:
            self._pulled.append(seams)
            self.loader = seams.loader
            self.applied += (lever.id,)
            return
        seams.undo()
        wanted = lever.environment(parameters) if lever.environment is not None else {}
        variables = " ".join(f"{name}={value}" for name, value in wanted.items())
        because = f"it wants {variables} before the process starts" if variables else f"it met nothing {self._given()}"
        self.not_applied += (NotApplied(lever.id, because),)

    def _given(self) -> str:
        given = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        names = [name for name, value in given.items() if value is not None]
        return f"to change in the {', '.join(names)} that was given" if names else "because nothing was given"


class LiveSeams:
    """The Seams of one lever on objects that exist already: what it asks for is done at once."""

    def __init__(
        self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, loader: DataLoader[Any] | None
    ) -> None:
        self.loader = loader
        self.contexts: list[Callable[[nn.Module], AbstractContextManager[object] | None]] = []
        self.inputs: list[Callable[[nn.Module, Any], Any]] = []
        self.outputs: list[Callable[[nn.Module, Any], Any]] = []
        self._model = model
        self._optimizer = optimizer
        self._patches = Patches()
        self._has_replaced = False
        self._undo: list[Undo] = []
        self._is_noted = False
        self._is_for_objects = False

    @property
    def has_effect(self) -> bool:
        """Whether the lever has met what it is for, or has changed what will be called."""
        is_around = self._model is not None and bool(self.contexts or self.inputs or self.outputs)
        return self._is_noted or (not self._is_for_objects and (self._has_replaced or is_around))

    def undo(self) -> None:
        """Make all as it was before, last first."""
        self._patches.undo()
        while self._undo:
            self._undo.pop()()

    def at_start(self, change: Callable[[], Undo]) -> None:
        """Now."""
        self._undo.append(change())

    def at_making(self, kind: type, change: Making) -> None:
        """The optimizer, or the loader, is made anew if it is of this kind and the change wants other arguments."""
        self._is_for_objects = True
        optimizer = self._optimizer
        if (
            optimizer is not None
            and isinstance(optimizer, kind)
            and type(optimizer).__module__.startswith("torch.optim")
        ):
            self._undo.append(_remade_optimizer(optimizer, change))
        if type(self.loader) is DataLoader and issubclass(DataLoader, kind):
            given = _loader_arguments(self.loader)
            before = dict(given)
            change(DataLoader, given)
            if _changes(before, given):
                self.loader = DataLoader(**given)

    def at_first_call(self, change: Callable[[nn.Module], Undo | None]) -> None:
        """Now, of the model."""
        self._is_for_objects = True
        undo = change(self._model) if self._model is not None else None
        if undo is not None:
            self._undo.append(undo)

    def around_calls(self, context: Callable[[nn.Module], AbstractContextManager[object] | None]) -> None:
        """Of the model."""
        self.contexts.append(context)

    def on_inputs(self, change: Callable[[nn.Module, Any], Any]) -> None:
        """Of the model."""
        self.inputs.append(change)

    def on_outputs(self, change: Callable[[nn.Module, Any], Any]) -> None:
        """Of the model."""
        self.outputs.append(change)

    def replace(self, owner: object, name: str, value: object) -> None:
        """An attribute of torch's: for everyone in this process, until all is undone."""
        self._has_replaced = True
        self._patches.set(owner, name, value)

    def at_source(self, file: str, change: Callable[[str], str]) -> None:
        """There is no text to change any more."""
        self._is_for_objects = True

    def note(self, what: str) -> None:
        """The lever has met what it is for."""
        self._is_noted = True


def _wrapped_calls(model: nn.Module, pulled: Sequence[LiveSeams]) -> Callable[[], None]:
    """Have calls of the model go through what levers asked for; returns how to undo it.

    It stands where `nn.Module.compile` puts its own: it is asked for at every call, and does not travel with copies and pickles.
    """
    contexts = [context for seams in pulled for context in seams.contexts]
    inputs = [change for seams in pulled for change in seams.inputs]
    outputs = [change for seams in pulled for change in seams.outputs]
    if not contexts and not inputs and not outputs:
        return lambda: None
    before = model._compiled_call_impl
    call: Callable[..., Any] = before if before is not None else model._call_impl

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for change in inputs:
            args, kwargs = change(model, (args, kwargs))
        with ExitStack() as stack:
            for around in contexts:
                context = around(model)
                if context is not None:
                    stack.enter_context(context)
            output = call(*args, **kwargs)
        for change in outputs:
            output = change(model, output)
        return output

    model._compiled_call_impl = wrapped

    def undo() -> None:
        model._compiled_call_impl = before

    return undo


def _remade_optimizer(optimizer: torch.optim.Optimizer, change: Making) -> Callable[[], None]:
    """The same optimizer with the arguments that `change` wants, its state and hooks kept; returns how to undo it."""
    given = _optimizer_arguments(optimizer)
    before = dict(given)
    change(type(optimizer), given)
    names = _changes(before, given) - {"params"}
    if not names:
        return lambda: None
    _transplant(optimizer, given, names)
    return lambda: _transplant(optimizer, _optimizer_arguments(optimizer) | {n: before.get(n) for n in names}, names)


def _transplant(optimizer: torch.optim.Optimizer, given: dict[str, Any], names: set[str]) -> None:
    """Put what an optimizer made with these arguments holds into this one; its state comes along."""
    fresh = type(optimizer)(**given)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group.update({name: given[name] for name in names})
    fresh.load_state_dict(state)
    for mine, its in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        mine.update(its)
    gone = [name for name in vars(optimizer) if name not in vars(fresh) and name in _MARKS]
    vars(optimizer).update({n: v for n, v in vars(fresh).items() if n != "param_groups" and not n.endswith("_hooks")})
    for name in gone:
        delattr(optimizer, name)


def _optimizer_arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """With which its class would make it again, in groups that name only what differs from the defaults."""
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
    """With which DataLoader would make it again."""
    names = (
        "num_workers",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "in_order",
    )
    given = {name: getattr(loader, name) for name in names}
    given |= {"dataset": loader.dataset, "persistent_workers": loader.persistent_workers}
    if loader.num_workers:
        given["prefetch_factor"] = loader.prefetch_factor
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is None or loader.collate_fn is not default_collate:
        given["collate_fn"] = loader.collate_fn
    if isinstance(loader.dataset, IterableDataset):
        return given | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if batches is None:
        return given | {"batch_size": None, "sampler": sampler}
    if type(batches) is not BatchSampler:
        return given | {"batch_sampler": batches}
    given |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if type(sampler) is SequentialSampler:
        return given
    is_usual = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    if is_usual and isinstance(sampler, RandomSampler) and sampler.generator is loader.generator:
        return given | {"shuffle": True}
    return given | {"sampler": sampler}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    names = before.keys() | after.keys()
    return {name for name in names if _differs(before.get(name), after.get(name))}


def _differs(one: object, two: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        return one is not two
    return one is not two and one != two
