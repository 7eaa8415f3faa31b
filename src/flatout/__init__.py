"""flatout: makes PyTorch models run flat out, and proves it.

Importing this package imports nothing else; each public name is fetched from its home when it is first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.adapting.adapted import Adapted as Adapted
    from flatout.adapting.front import bitfit as bitfit
    from flatout.adapting.front import bottleneck as bottleneck
    from flatout.adapting.front import freeze as freeze
    from flatout.adapting.front import lora as lora
    from flatout.adapting.front import prefix as prefix
    from flatout.adapting.front import prompt as prompt
    from flatout.compression.distilling.distilled import distil as distil
    from flatout.compression.pruning.blocks import drop_blocks as drop_blocks
    from flatout.compression.pruning.cutting import apply_pruning as apply_pruning
    from flatout.compression.pruning.pruning import prune as prune
    from flatout.compression.pruning.sparse import sparsify as sparsify
    from flatout.cost.batching import SampleCost as SampleCost
    from flatout.cost.batching import fitted_cost as fitted_cost
    from flatout.cost.batching import transformer_cost as transformer_cost
    from flatout.data.batches import Batches as Batches
    from flatout.data.feed import Feed as Feed
    from flatout.data.keyed import Keyed as Keyed
    from flatout.data.prefetch import Prefetch as Prefetch
    from flatout.data.ragged import Ragged as Ragged
    from flatout.data.ragged import collate_ragged as collate_ragged
    from flatout.data.ragged import ragged as ragged
    from flatout.data.rows import Rows as Rows
    from flatout.data.rows import RowsOf as RowsOf
    from flatout.data.rows import pack as pack
    from flatout.data.sizes import growing as growing
    from flatout.data.threads import Threads as Threads
    from flatout.errors import CaptureError as CaptureError
    from flatout.errors import CheckpointError as CheckpointError
    from flatout.errors import FlatoutError as FlatoutError
    from flatout.errors import HardwareError as HardwareError
    from flatout.errors import NativeError as NativeError
    from flatout.errors import NotFiniteError as NotFiniteError
    from flatout.errors import NotFused as NotFused
    from flatout.errors import PromiseBroken as PromiseBroken
    from flatout.errors import RecordError as RecordError
    from flatout.errors import ScriptError as ScriptError
    from flatout.errors import UsageError as UsageError
    from flatout.kernels.attention import masks as masks
    from flatout.kernels.attention import scores as scores
    from flatout.kernels.attention.front import attention as attention
    from flatout.kernels.attention.front import attention_choice as attention_choice
    from flatout.kernels.linear_cross_entropy.call import linear_cross_entropy as linear_cross_entropy
    from flatout.kernels.matmul.product import matmul as matmul
    from flatout.kernels.norm.call import layer_norm as layer_norm
    from flatout.kernels.norm.call import rms_norm as rms_norm
    from flatout.kernels.rotary.call import rotary as rotary
    from flatout.kernels.swiglu.call import swiglu as swiglu
    from flatout.measure.probe import measure_machine as measure_machine
    from flatout.measure.weightless import weigh as weigh
    from flatout.parallel.agreement import check_layout as check_layout
    from flatout.parallel.clipping import clip_gradients as clip_gradients
    from flatout.parallel.compressed import Compressed as Compressed
    from flatout.parallel.compressed import compress as compress
    from flatout.parallel.experts import Experts as Experts
    from flatout.parallel.experts import auxiliary_loss as auxiliary_loss
    from flatout.parallel.experts import balance_experts as balance_experts
    from flatout.parallel.experts import spread_experts as spread_experts
    from flatout.parallel.given import given_layout as given_layout
    from flatout.parallel.layouts import lay_out as lay_out
    from flatout.parallel.streamed import Streamed as Streamed
    from flatout.parallel.streamed import stream_weights as stream_weights
    from flatout.parallel.world import World as World
    from flatout.records.evidence import Evidence as Evidence
    from flatout.records.finding import Diagnosis as Diagnosis
    from flatout.records.finding import Finding as Finding
    from flatout.records.scale import Layout as Layout
    from flatout.runs.run import Run as Run
    from flatout.session import apply as apply
    from flatout.session import check as check
    from flatout.shrinking.live import shrink as shrink
    from flatout.shrinking.written import load_shrunk as load_shrunk
    from flatout.surviving.sums import first_difference as first_difference
    from flatout.surviving.sums import state_sums as state_sums
    from flatout.surviving.supervisor import Job as Job
    from flatout.surviving.supervisor import Supervisor as Supervisor
    from flatout.surviving.survivor import Survivor as Survivor
    from flatout.training.accumulation import accumulating as accumulating
    from flatout.training.checkpoints import Checkpoints as Checkpoints
    from flatout.training.offload import offload_state as offload_state
    from flatout.training.precision import Precision as Precision
    from flatout.training.recompute import recompute as recompute
    from flatout.training.recompute_within import recompute_within as recompute_within
    from flatout.training.remember import remember as remember
    from flatout.training.schedules import layer_wise as layer_wise
    from flatout.training.schedules import one_cycle as one_cycle
    from flatout.training.schedules import set_rate as set_rate
    from flatout.training.schedules import warm_up_cosine as warm_up_cosine
    from flatout.training.schedules import warm_up_stable_decay as warm_up_stable_decay
    from flatout.training.snapshot import copied as copied
    from flatout.training.watch import NanWatch as NanWatch
    from flatout.verification.guarantee import guarantee as guarantee

__version__ = "0.1.0"

# Public name -> "module:attribute". The imports above say the same to type checkers; a test holds the two together.
_HOMES = {
    "Adapted": "flatout.adapting.adapted:Adapted",
    "Batches": "flatout.data.batches:Batches",
    "CaptureError": "flatout.errors:CaptureError",
    "CheckpointError": "flatout.errors:CheckpointError",
    "Checkpoints": "flatout.training.checkpoints:Checkpoints",
    "Compressed": "flatout.parallel.compressed:Compressed",
    "Diagnosis": "flatout.records.finding:Diagnosis",
    "Evidence": "flatout.records.evidence:Evidence",
    "Experts": "flatout.parallel.experts:Experts",
    "Feed": "flatout.data.feed:Feed",
    "Finding": "flatout.records.finding:Finding",
    "FlatoutError": "flatout.errors:FlatoutError",
    "HardwareError": "flatout.errors:HardwareError",
    "Job": "flatout.surviving.supervisor:Job",
    "Keyed": "flatout.data.keyed:Keyed",
    "Layout": "flatout.records.scale:Layout",
    "NanWatch": "flatout.training.watch:NanWatch",
    "NativeError": "flatout.errors:NativeError",
    "NotFiniteError": "flatout.errors:NotFiniteError",
    "NotFused": "flatout.errors:NotFused",
    "Precision": "flatout.training.precision:Precision",
    "Prefetch": "flatout.data.prefetch:Prefetch",
    "PromiseBroken": "flatout.errors:PromiseBroken",
    "Ragged": "flatout.data.ragged:Ragged",
    "RecordError": "flatout.errors:RecordError",
    "Rows": "flatout.data.rows:Rows",
    "RowsOf": "flatout.data.rows:RowsOf",
    "Run": "flatout.runs.run:Run",
    "SampleCost": "flatout.cost.batching:SampleCost",
    "ScriptError": "flatout.errors:ScriptError",
    "Streamed": "flatout.parallel.streamed:Streamed",
    "Supervisor": "flatout.surviving.supervisor:Supervisor",
    "Survivor": "flatout.surviving.survivor:Survivor",
    "Threads": "flatout.data.threads:Threads",
    "UsageError": "flatout.errors:UsageError",
    "World": "flatout.parallel.world:World",
    "accumulating": "flatout.training.accumulation:accumulating",
    "apply": "flatout.session:apply",
    "apply_pruning": "flatout.compression.pruning.cutting:apply_pruning",
    "attention": "flatout.kernels.attention.front:attention",
    "attention_choice": "flatout.kernels.attention.front:attention_choice",
    "auxiliary_loss": "flatout.parallel.experts:auxiliary_loss",
    "balance_experts": "flatout.parallel.experts:balance_experts",
    "bitfit": "flatout.adapting.front:bitfit",
    "bottleneck": "flatout.adapting.front:bottleneck",
    "check": "flatout.session:check",
    "check_layout": "flatout.parallel.agreement:check_layout",
    "clip_gradients": "flatout.parallel.clipping:clip_gradients",
    "collate_ragged": "flatout.data.ragged:collate_ragged",
    "compress": "flatout.parallel.compressed:compress",
    "copied": "flatout.training.snapshot:copied",
    "distil": "flatout.compression.distilling.distilled:distil",
    "drop_blocks": "flatout.compression.pruning.blocks:drop_blocks",
    "first_difference": "flatout.surviving.sums:first_difference",
    "fitted_cost": "flatout.cost.batching:fitted_cost",
    "freeze": "flatout.adapting.front:freeze",
    "given_layout": "flatout.parallel.given:given_layout",
    "growing": "flatout.data.sizes:growing",
    "guarantee": "flatout.verification.guarantee:guarantee",
    "lay_out": "flatout.parallel.layouts:lay_out",
    "layer_norm": "flatout.kernels.norm.call:layer_norm",
    "layer_wise": "flatout.training.schedules:layer_wise",
    "linear_cross_entropy": "flatout.kernels.linear_cross_entropy.call:linear_cross_entropy",
    "load_shrunk": "flatout.shrinking.written:load_shrunk",
    "lora": "flatout.adapting.front:lora",
    "masks": "flatout.kernels.attention:masks",
    "matmul": "flatout.kernels.matmul.product:matmul",
    "measure_machine": "flatout.measure.probe:measure_machine",
    "offload_state": "flatout.training.offload:offload_state",
    "one_cycle": "flatout.training.schedules:one_cycle",
    "pack": "flatout.data.rows:pack",
    "prefix": "flatout.adapting.front:prefix",
    "prompt": "flatout.adapting.front:prompt",
    "prune": "flatout.compression.pruning.pruning:prune",
    "ragged": "flatout.data.ragged:ragged",
    "recompute": "flatout.training.recompute:recompute",
    "recompute_within": "flatout.training.recompute_within:recompute_within",
    "remember": "flatout.training.remember:remember",
    "rms_norm": "flatout.kernels.norm.call:rms_norm",
    "rotary": "flatout.kernels.rotary.call:rotary",
    "scores": "flatout.kernels.attention:scores",
    "set_rate": "flatout.training.schedules:set_rate",
    "shrink": "flatout.shrinking.live:shrink",
    "sparsify": "flatout.compression.pruning.sparse:sparsify",
    "spread_experts": "flatout.parallel.experts:spread_experts",
    "state_sums": "flatout.surviving.sums:state_sums",
    "stream_weights": "flatout.parallel.streamed:stream_weights",
    "swiglu": "flatout.kernels.swiglu.call:swiglu",
    "transformer_cost": "flatout.cost.batching:transformer_cost",
    "warm_up_cosine": "flatout.training.schedules:warm_up_cosine",
    "warm_up_stable_decay": "flatout.training.schedules:warm_up_stable_decay",
    "weigh": "flatout.measure.weightless:weigh",
}

__all__ = tuple(_HOMES)


def __getattr__(name: str) -> object:
    """The public object called `name`, imported on first use and kept."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'flatout' has no attribute '{name}'; it offers {', '.join(_HOMES)}")
    module, attribute = home.split(":")
    value: object = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
