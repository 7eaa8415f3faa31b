"""Flatout makes PyTorch models run flat out, and proves it.

Importing this package imports nothing else; each public name is fetched from its home when it is first used (PEP 562). Rooms
that are named after a verb, such as `flatout.check`, are packages that can be called: `flatout.check(step, batches)`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.app.cell_magic import load_ipython_extension as load_ipython_extension
    from flatout.app.plans import apply as apply
    from flatout.app.session import check as check
    from flatout.app.shrink_model import shrink as shrink
    from flatout.app.tune_script import tune as tune
    from flatout.app.verify_script import verify as verify
    from flatout.blocks.data.batches import Batches as Batches
    from flatout.blocks.data.by_length import call_by_length as call_by_length
    from flatout.blocks.data.feed import Feed as Feed
    from flatout.blocks.data.in_worker import InWorker as InWorker
    from flatout.blocks.data.prefetch import Prefetch as Prefetch
    from flatout.blocks.data.prefetch import Threads as Threads
    from flatout.blocks.data.ragged import Ragged as Ragged
    from flatout.blocks.data.ragged import collate_ragged as collate_ragged
    from flatout.blocks.elastic.survivor import Survivor as Survivor
    from flatout.blocks.kernels.attention import masks as masks
    from flatout.blocks.kernels.attention import scores as scores
    from flatout.blocks.kernels.attention.api import attention as attention
    from flatout.blocks.kernels.linear_cross_entropy.call import linear_cross_entropy as linear_cross_entropy
    from flatout.blocks.kernels.lora_linear.call import lora_linear as lora_linear
    from flatout.blocks.kernels.matmul.product import matmul as matmul
    from flatout.blocks.kernels.norm.call import layer_norm as layer_norm
    from flatout.blocks.kernels.norm.call import rms_norm as rms_norm
    from flatout.blocks.kernels.packed.skip_padding import skip_padding as skip_padding
    from flatout.blocks.kernels.rotary.call import rotary as rotary
    from flatout.blocks.kernels.swiglu.call import swiglu as swiglu
    from flatout.blocks.parallel.agreement import check_layout as check_layout
    from flatout.blocks.parallel.layouts import parallelize as parallelize
    from flatout.blocks.parallel.world import World as World
    from flatout.blocks.parallel.world import layout_from_environment as layout_from_environment
    from flatout.blocks.recording.run import Run as Run
    from flatout.blocks.training.captured import captured as captured
    from flatout.blocks.training.captured_updates import captured_update as captured_update
    from flatout.blocks.training.checkpoints import Checkpoints as Checkpoints
    from flatout.blocks.training.frozen_weights import hold_frozen_weights as hold_frozen_weights
    from flatout.blocks.training.host_arrays import as_arrays as as_arrays
    from flatout.blocks.training.memoise import memoise as memoise
    from flatout.blocks.training.nan_watch import NanWatch as NanWatch
    from flatout.blocks.training.offload import offload_state as offload_state
    from flatout.blocks.training.pointwise_convolutions import (
        pointwise_convolutions_as_products as pointwise_convolutions_as_products,
    )
    from flatout.blocks.training.precision import Precision as Precision
    from flatout.blocks.training.recompute import recompute as recompute
    from flatout.blocks.training.rows_as_read import compute_rows_as_read as compute_rows_as_read
    from flatout.blocks.training.schedules import set_rate as set_rate
    from flatout.blocks.training.schedules import warm_up_cosine as warm_up_cosine
    from flatout.blocks.training.snapshot import copied as copied
    from flatout.blocks.training.vectorised_draws import vectorise_draws as vectorise_draws
    from flatout.core.errors import ExpectationFailed as ExpectationFailed
    from flatout.core.errors import FlatoutError as FlatoutError
    from flatout.core.errors import NotFiniteError as NotFiniteError
    from flatout.core.errors import NotFused as NotFused
    from flatout.core.errors import UsageError as UsageError
    from flatout.core.records.evidence import Evidence as Evidence
    from flatout.core.records.finding import Diagnosis as Diagnosis
    from flatout.core.records.finding import Finding as Finding
    from flatout.core.records.scale import Layout as Layout
    from flatout.machine.measure.probe import measure_machine as measure_machine
    from flatout.shrink.adapt.api import lora as lora
    from flatout.shrink.compose.saved_model import load_shrunk as load_shrunk
    from flatout.shrink.distil.distillation import distil as distil
    from flatout.shrink.prune.pruning import prune as prune
    from flatout.tune.verify.expect.api import expect as expect

__version__ = "0.1.0"

# Public name -> "module:attribute". The imports above say the same to type checkers; a test holds the two together.
_HOMES = {
    "Batches": "flatout.blocks.data.batches:Batches",
    "Checkpoints": "flatout.blocks.training.checkpoints:Checkpoints",
    "Diagnosis": "flatout.core.records.finding:Diagnosis",
    "Evidence": "flatout.core.records.evidence:Evidence",
    "ExpectationFailed": "flatout.core.errors:ExpectationFailed",
    "Feed": "flatout.blocks.data.feed:Feed",
    "InWorker": "flatout.blocks.data.in_worker:InWorker",
    "Finding": "flatout.core.records.finding:Finding",
    "FlatoutError": "flatout.core.errors:FlatoutError",
    "Layout": "flatout.core.records.scale:Layout",
    "NanWatch": "flatout.blocks.training.nan_watch:NanWatch",
    "NotFiniteError": "flatout.core.errors:NotFiniteError",
    "NotFused": "flatout.core.errors:NotFused",
    "Precision": "flatout.blocks.training.precision:Precision",
    "Prefetch": "flatout.blocks.data.prefetch:Prefetch",
    "Ragged": "flatout.blocks.data.ragged:Ragged",
    "Run": "flatout.blocks.recording.run:Run",
    "Survivor": "flatout.blocks.elastic.survivor:Survivor",
    "Threads": "flatout.blocks.data.prefetch:Threads",
    "UsageError": "flatout.core.errors:UsageError",
    "World": "flatout.blocks.parallel.world:World",
    "apply": "flatout.app.plans:apply",
    "as_arrays": "flatout.blocks.training.host_arrays:as_arrays",
    "attention": "flatout.blocks.kernels.attention.api:attention",
    "call_by_length": "flatout.blocks.data.by_length:call_by_length",
    "captured": "flatout.blocks.training.captured:captured",
    "captured_update": "flatout.blocks.training.captured_updates:captured_update",
    "check": "flatout.app.session:check",
    "check_layout": "flatout.blocks.parallel.agreement:check_layout",
    "collate_ragged": "flatout.blocks.data.ragged:collate_ragged",
    "compute_rows_as_read": "flatout.blocks.training.rows_as_read:compute_rows_as_read",
    "copied": "flatout.blocks.training.snapshot:copied",
    "distil": "flatout.shrink.distil.distillation:distil",
    "expect": "flatout.tune.verify.expect.api:expect",
    "hold_frozen_weights": "flatout.blocks.training.frozen_weights:hold_frozen_weights",
    "layer_norm": "flatout.blocks.kernels.norm.call:layer_norm",
    "layout_from_environment": "flatout.blocks.parallel.world:layout_from_environment",
    "linear_cross_entropy": "flatout.blocks.kernels.linear_cross_entropy.call:linear_cross_entropy",
    "load_ipython_extension": "flatout.app.cell_magic:load_ipython_extension",
    "load_shrunk": "flatout.shrink.compose.saved_model:load_shrunk",
    "lora": "flatout.shrink.adapt.api:lora",
    "lora_linear": "flatout.blocks.kernels.lora_linear.call:lora_linear",
    "masks": "flatout.blocks.kernels.attention:masks",
    "matmul": "flatout.blocks.kernels.matmul.product:matmul",
    "measure_machine": "flatout.machine.measure.probe:measure_machine",
    "memoise": "flatout.blocks.training.memoise:memoise",
    "offload_state": "flatout.blocks.training.offload:offload_state",
    "parallelize": "flatout.blocks.parallel.layouts:parallelize",
    "prune": "flatout.shrink.prune.pruning:prune",
    "pointwise_convolutions_as_products": (
        "flatout.blocks.training.pointwise_convolutions:pointwise_convolutions_as_products"
    ),
    "recompute": "flatout.blocks.training.recompute:recompute",
    "rms_norm": "flatout.blocks.kernels.norm.call:rms_norm",
    "rotary": "flatout.blocks.kernels.rotary.call:rotary",
    "scores": "flatout.blocks.kernels.attention:scores",
    "set_rate": "flatout.blocks.training.schedules:set_rate",
    "shrink": "flatout.app.shrink_model:shrink",
    "skip_padding": "flatout.blocks.kernels.packed.skip_padding:skip_padding",
    "swiglu": "flatout.blocks.kernels.swiglu.call:swiglu",
    "tune": "flatout.app.tune_script:tune",
    "vectorise_draws": "flatout.blocks.training.vectorised_draws:vectorise_draws",
    "verify": "flatout.app.verify_script:verify",
    "warm_up_cosine": "flatout.blocks.training.schedules:warm_up_cosine",
}

__all__ = tuple(_HOMES)

_VERBS = ("check", "shrink", "tune")
"""Public names that are those of rooms, too: Python binds the package to the name, and calling the package calls the verb."""


class _ByName(ModuleType):
    """A module that is pickled by its name: Ray, Dask and others pickle functions together with the modules that they use."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return import_module, (self.__name__,)


class _Verb(_ByName):
    """A room named after a verb."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        return _at_home(self.__name__.rpartition(".")[2])(*args, **kwargs)  # type: ignore[operator]

    @property
    def __signature__(self) -> object:
        from inspect import signature

        return signature(_at_home(self.__name__.rpartition(".")[2]))  # type: ignore[arg-type]


class _Root(_ByName):
    def __setattr__(self, name: str, value: object) -> None:
        if name in _VERBS and isinstance(value, ModuleType):
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Root


def _at_home(name: str) -> object:
    module, attribute = _HOMES[name].split(":")
    value: object = getattr(import_module(module), attribute)
    return value


def __getattr__(name: str) -> object:
    """The public object called `name`, imported when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'flatout' has no attribute '{name}'; it offers {', '.join(_HOMES)}")
    value = import_module(f"flatout.{name}") if name in _VERBS else _at_home(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
