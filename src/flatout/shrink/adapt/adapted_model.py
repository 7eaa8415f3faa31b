"""A model with adapters: which is used, what it trains, merging it, and the plain model back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.core.records.adapt import BitFit, Freeze, Lora, Merged, Method, Trained
from flatout.shrink.adapt import files, peft_files
from flatout.shrink.adapt.attachment import (
    adapter_parts,
    attach,
    detach,
    plain_modules,
    plain_parameters,
    resolve_method,
)
from flatout.shrink.adapt.low_rank import merge_weights
from flatout.shrink.float64_reference import measured_error


class Adapted:
    """A model of which adapters train little. `model` is the caller's own, changed in place until `undo`.

    One adapter is used at a time. What the model holds itself and training changes (parameters that are not frozen, running
    statistics) belongs to the adapter in use, too: it comes and goes with it.

    >>> plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    >>> adapted = adapt(plain, Lora(rank=4))
    >>> adapted.trained.parameters, adapted.trained.of_parameters
    (1024, 8320)
    >>> optimizer = torch.optim.AdamW(adapted.parameters())
    >>> adapted.undo()
    """

    def __init__(self, model: nn.Module) -> None:
        if any(True for _ in adapter_parts(model)):
            raise UsageError("the model has adapters already; use `add` of what adapted it, or undo that first")
        self.model = model
        self._trained: dict[str, Trained] = {}
        self._active: str | None = None
        self._required = {path: p.requires_grad for path, p in plain_parameters(model)}
        self._plain: dict[str, Tensor] = {path: b.detach().clone() for path, b in self._buffers()}
        self._own: dict[str, dict[str, Tensor]] = {}
        self._merged: dict[str, Tensor] | None = None

    # -- adapters -----------------------------------------------------------------------------------------------------------

    def add(self, method: Method, *, name: str = "default", seed: int | torch.Generator = 0) -> Trained:
        """Add another adapter, which is used from here on."""
        return self._add(resolve_method(self.model, method), name, _generator(seed))

    def _add(self, placed: Trained, name: str, generator: torch.Generator) -> Trained:
        if not name.isidentifier() or hasattr(nn.ModuleDict, name) or name in ("active", "part", "plain_class"):
            raise UsageError(f"'{name}' cannot be an adapter's name; use letters, digits and _")
        if name in self._trained:
            raise UsageError(f"there is an adapter '{name}'; give another name")
        self.off()
        attach(self.model, placed, name=name, generator=generator)
        parameters = dict(plain_parameters(self.model))
        if not _is_added(placed):
            for path in placed.hosts:
                self._plain.setdefault(path, parameters[path].detach().clone())
        self._trained[name] = placed
        num, of = sum(p.numel() for _, p in self._trained_by(name)), sum(p.numel() for p in parameters.values())
        self._trained[name] = msgspec.structs.replace(placed, parameters=num, of_parameters=of)
        self.use(name)
        return self._trained[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._trained)

    @property
    def active(self) -> str | None:
        return self._active

    @property
    def trained(self) -> Trained:
        """What the adapter in use trains."""
        return self._trained[self._used()]

    def use(self, name: str) -> None:
        """Compute with this adapter and train it."""
        if name not in self._trained:
            raise UsageError(f"there is no adapter '{name}'; there are {', '.join(self._trained) or 'none'}")
        self._not_merged("use another adapter")
        if name == self._active:
            return
        self.off()
        self._active = name
        self._write(self._own.pop(name, {}))
        for _, parts in adapter_parts(self.model):
            parts.active = name
        for _, parameter in self._trained_by(name):
            parameter.requires_grad_(True)

    def off(self) -> None:
        """Compute as the plain model does, bit for bit; nothing is trained."""
        self._not_merged("switch off")
        if self._active is not None:
            self._own[self._active] = self._read(self._own_paths(self._active))
        self._write(self._plain)
        self._active = None
        for _, parts in adapter_parts(self.model):
            parts.active = None
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that the adapter in use trains: those for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their names in the model's state dict."""
        self._not_merged("train")
        return self._trained_by(self._used())

    # -- merging ------------------------------------------------------------------------------------------------------------

    def merge(self, *inputs: Any) -> Merged:
        """Write the low-rank pairs in use into the weights, which then cost no time; what was there is kept for `unmerge`.

        The sums are made in float64 and rounded once. With `inputs` for a call of the model, its outputs before and after are
        compared with the same model in float64, in eval mode.

        Raises UsageError for adapters that are no weights (bottlenecks, prompts, prefixes) and for weights that are shared.
        """
        self._not_merged("merge again")
        name = self._used()
        if not isinstance(self._trained[name].method, Lora):
            raise UsageError(
                f"'{name}' is no low-rank pair: {type(self._trained[name].method).__name__} has no weight to merge"
            )
        exact, before = measured_error(self.model, inputs) if inputs else (None, None)
        self._merged, error = merge_weights(self.model, self._trained[name].hosts)
        for _, parts in adapter_parts(self.model):
            parts.active = None
        if exact is None:
            return Merged(weight_error=error)
        _, after = measured_error(self.model, inputs, exact=exact)
        return Merged(weight_error=error, adapted_error=before, merged_error=after)

    def unmerge(self) -> None:
        """The weights as they were before `merge`, bit for bit, and the adapter beside them again."""
        if self._merged is None:
            raise UsageError("nothing is merged; call merge first")
        self._write(self._merged)
        self._merged = None
        for _, parts in adapter_parts(self.model):
            parts.active = self._active

    # -- the end ------------------------------------------------------------------------------------------------------------

    def undo(self) -> None:
        """The plain model, bit for bit; adapters that were not saved are lost."""
        if self._merged is not None:
            self.unmerge()
        self.off()
        self._end()

    def bake(self) -> nn.Module:
        """The plain model with the adapter in use in its weights for good: no adapter, nothing to undo."""
        if _is_added(self.trained) and self._merged is None:
            self.merge()
        self._merged = None
        self._end()
        return self.model

    def _end(self) -> None:
        detach(self.model)
        for path, parameter in plain_parameters(self.model):
            parameter.requires_grad_(self._required[path])
            parameter.grad = None
        self._trained, self._plain, self._own, self._active = {}, {}, {}, None

    # -- files --------------------------------------------------------------------------------------------------------------

    def save(self, path: Path | str) -> None:
        """The adapter in use alone, as one safetensors file, whole or not at all."""
        files.write_adapter(Path(path), self.trained, self.state())

    def load(self, path: Path | str, *, name: str = "default") -> Trained:
        """Add the adapter of a file, for this model, and use it.

        Raises CheckpointError where the file is damaged or of another model.
        """
        saved, tensors = files.read_adapter(Path(path))
        files.check_fits_model(self.model, saved, tensors, Path(path))
        self._add(saved, name, _generator(0))
        self._take(tensors, path=Path(path))
        return self.trained

    def save_peft(self, folder: Path | str) -> None:
        """Write the adapter in use as a folder that `peft.PeftModel.from_pretrained(plain_model, folder)` loads.

        Raises UsageError for what PEFT cannot hold.
        """
        peft_files.write_peft(self.model, self.trained, self.state(), Path(folder))

    def load_peft(self, folder: Path | str, *, name: str = "default") -> Trained:
        """Add the LoRA or DoRA adapter of a folder that PEFT wrote for this model, and use it."""
        placed, scales, tensors = peft_files.read_peft(self.model, Path(folder))
        self._add(placed, name, _generator(0))
        self._take(tensors, path=Path(folder))
        for host, scale in scales.items():
            peft_files.pair(self.model, host).scale = scale
        return self.trained

    def state(self) -> dict[str, Tensor]:
        """What the adapter in use consists of: its parameters, and tensors of the model's own that it changed."""
        name = self._used()
        mine = {f"{path}.{inner}": p.detach() for path, inner, p in self._added(name)}
        plain, own, trained = self._plain, self._read(self._own_paths(name)), self._trained_own(name)
        return mine | {p: t for p, t in own.items() if p in trained or not torch.equal(t, plain[p].to(t.device))}

    def _take(self, tensors: Mapping[str, Tensor], *, path: Path) -> None:
        name = self._used()
        added = {f"{at}.{inner}": parameter for at, inner, parameter in self._added(name)}
        own = dict(self._everything())
        files.copy_into(tensors, {**own, **added}, required=set(added), path=path)

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _added(self, name: str) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Path of the slots, name in there, parameter."""
        for path, parts in adapter_parts(self.model):
            if name in parts:
                yield from ((path, inner, p) for inner, p in parts[name].named_parameters())

    def _trained_by(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        if _is_added(self._trained[name]):
            yield from ((f"{path}.{name}.{inner}", p) for path, inner, p in self._added(name))
        else:
            hosts = self._trained_own(name)
            yield from ((path, p) for path, p in plain_parameters(self.model) if path in hosts)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for path, module in plain_modules(self.model):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{path}.{name}".lstrip("."), buffer

    def _everything(self) -> Iterator[tuple[str, Tensor]]:
        yield from plain_parameters(self.model)
        yield from self._buffers()

    def _trained_own(self, name: str) -> set[str]:
        """Paths of the model's own parameters that an adapter trains."""
        return set() if _is_added(self._trained[name]) else set(self._trained[name].hosts)

    def _own_paths(self, name: str) -> set[str]:
        return self._trained_own(name) | {path for path, _ in self._buffers()}

    def _read(self, paths: set[str]) -> dict[str, Tensor]:
        return {path: tensor.detach().clone() for path, tensor in self._everything() if path in paths}

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for path, tensor in self._everything():
            if path in values:
                tensor.copy_(values[path])

    def _used(self) -> str:
        if self._active is None:
            raise UsageError(f"no adapter is used; use one of {', '.join(self._trained) or 'none'}")
        return self._active

    def _not_merged(self, what: str) -> None:
        if self._merged is not None:
            raise UsageError(f"the adapter '{self._active}' is merged; unmerge it before you {what}")


def _is_added(trained: Trained) -> bool:
    """Are its parameters new ones, not the model's own?"""
    return not isinstance(trained.method, BitFit | Freeze)


def _generator(seed: int | torch.Generator) -> torch.Generator:
    return seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)


def adapt(model: nn.Module, method: Method, *, name: str = "default", seed: int | torch.Generator = 0) -> Adapted:
    """Let a method train little of a model; everything else is frozen. The global random state is left as it is.

    Raises UsageError for what the model does not have or cannot take; the model is then as it was.
    """
    placed = resolve_method(model, method)
    adapted = Adapted(model)
    adapted._add(placed, name, _generator(seed))
    return adapted
