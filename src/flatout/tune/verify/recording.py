"""Recording the first steps of a loop: losses, gradients, parameters and outputs as digests, one file a step."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.check.observe.calls import wrapped
from flatout.core.errors import CheckpointError
from flatout.core.records.verdict import What
from flatout.core.tensors.nests import tensors_in, tree_leaves
from flatout.core.tensors.saved import load_saved_tensors
from flatout.tune.verify.tensor_digests import TensorDigest, digest_of

_ADDED: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
"""Parts of a parameter's path that torch.compile, FSDP, recompute and DDP put into it."""

_OF_MODULE: Final = "output"

Step = dict[What, dict[str, TensorDigest]]
"""Digests by what they are of, then by name."""


def is_module_output(name: str) -> bool:
    """Whether an output of this name is what a module returned, and not what an environment was given."""
    return name.startswith(f"{_OF_MODULE} ")


class Recorder:
    """Collects one step after the other, and writes each whole to `folder` as `step<number>.pt`, counted from 1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._step: Step = {}
        self._modules: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._num_losses = 0
        self._num_outputs = 0
        self._num_actions = 0

    def add_module(self, module: nn.Module) -> None:
        """A root module, whose parameters give their names."""
        if not any(m is module for m in self._modules):
            self._modules.append(module)

    def add_loss(self, loss: Tensor) -> None:
        """A tensor that a backward starts from."""
        self._num_losses += 1
        self._add("loss", f"loss {self._num_losses}", loss)

    def add_output(self, output: Any) -> None:
        """What a root module returned."""
        for tensor in tensors_in(output):
            self._num_outputs += 1
            self._add("output", f"{_OF_MODULE} {self._num_outputs}", tensor)

    def add_action(self, action: Any) -> None:
        """What an environment was given: arrays and numbers."""
        for leaf in tree_leaves(action):
            with suppress(TypeError, ValueError, RuntimeError):  # a text, or an object of the environment's own
                tensor = torch.as_tensor(leaf)
                self._num_actions += 1
                self._add("output", f"action {self._num_actions}", tensor)

    def add_gradients(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step.

        A gradient scaler leaves it to a fused optimizer to unscale the gradients, and to skip a step with an infinite one.
        """
        if not any(o is optimizer for o in self._optimizers):
            self._optimizers.append(optimizer)
        scale, is_infinite = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if is_infinite is not None and is_infinite.item():
            return
        for name, parameter in self._named(optimizer):
            if parameter.grad is not None:
                self._add("gradient", name, parameter.grad if scale is None else parameter.grad / scale)

    def clear(self) -> None:
        """Delete all steps that were recorded so far."""
        for path in self.folder.glob("step*.pt"):
            path.unlink()
        self._step = {}
        self._num_losses = self._num_outputs = self._num_actions = 0

    def end(self, number: int) -> None:
        """The step is over: write it with the parameters as they are now."""
        for optimizer in self._optimizers:
            for name, parameter in self._named(optimizer):
                self._add("parameter", name, parameter)
        if not self._optimizers:
            for name, parameter in self._names().values():
                if parameter.requires_grad and parameter.grad is not None:
                    self._add("gradient", name, parameter.grad)
                    self._add("parameter", name, parameter)
        path = self.folder / f"step{number}.pt"
        beside = path.with_suffix(f".{os.getpid()}.part")
        torch.save({what: {n: tuple(m) for n, m in digests.items()} for what, digests in self._step.items()}, beside)
        os.replace(beside, path)
        self._step = {}
        self._num_losses = self._num_outputs = self._num_actions = 0

    def _add(self, what: What, name: str, tensor: Tensor) -> None:
        self._step.setdefault(what, {})[name] = digest_of(tensor)

    def _names(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Parameters by identity: class of the root module, numbered if there are several, and path, less what frameworks add."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        classes: Counter[str] = Counter()
        for module in self._modules:
            title = type(wrapped(module)).__name__
            classes[title] += 1
            title += f" ({classes[title]})" if classes[title] > 1 else ""
            for name, parameter in module.named_parameters():
                path = ".".join(part for part in name.split(".") if part not in _ADDED)
                found.setdefault(id(parameter), (f"{title}.{path}", parameter))
        return found

    def _named(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """An optimizer's tensors with the names that their modules give them; by group and place where none does."""
        names = self._names()
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                known = names.get(id(parameter))
                yield (known[0] if known else f"{type(optimizer).__name__} group {number}, tensor {place}"), parameter


def read_recorded_steps(folder: Path) -> list[Step]:
    """The steps that a Recorder wrote to `folder`, in order, up to the first that is missing.

    Raises CheckpointError where one is damaged.
    """
    steps: list[Step] = []
    while (path := folder / f"step{len(steps) + 1}.pt").exists():
        read = load_saved_tensors(path, name=str(path))
        try:
            steps.append({what: {n: TensorDigest(*m) for n, m in digests.items()} for what, digests in read.items()})
        except (AttributeError, TypeError) as e:
            raise CheckpointError(f"'{path}' holds no recorded step: {e}") from e
    return steps
