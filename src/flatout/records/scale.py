"""What a run on many devices is made of: a model's sizes, the devices and what joins them, a layout, how the software works."""

from __future__ import annotations

from typing import Literal

from flatout.errors import PlanError
from flatout.records.record import Record

Recompute = Literal["none", "selective", "full"]
ScheduleKind = Literal["gpipe", "1f1b", "interleaved"]


class ModelShape(Record, frozen=True, kw_only=True):
    """A decoder-only transformer by its sizes. `ffn` None means 4 x hidden; `kv_heads` None as many as heads.

    `is_gated`: the feed-forward has three matrices (SwiGLU). `num_experts` feed-forwards a layer, of which a token takes
    `experts_per_token`. `is_tied`: the output layer is the embedding.
    """

    hidden: int
    layers: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int | None = None
    ffn: int | None = None
    is_gated: bool = False
    num_experts: int = 1
    experts_per_token: int = 1
    is_tied: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "vocab", "seq", "num_experts", "experts_per_token"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; give a positive number")
        if self.hidden % self.heads:
            raise PlanError(f"hidden {self.hidden} is no multiple of heads {self.heads}")
        if self.heads % self.key_heads:
            raise PlanError(f"heads {self.heads} are no multiple of kv_heads {self.kv_heads}")

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        """Width between the two products of the feed-forward."""
        return self.ffn or 4 * self.hidden

    @property
    def head_width(self) -> int:
        """Numbers of one head."""
        return self.hidden // self.heads


class Tier(Record, frozen=True, kw_only=True):
    """What joins groups of devices: all within `reach` devices are joined by it. `bytes_per_s` out of one device, one direction;
    `latency_s` of one message."""

    name: str
    reach: int
    bytes_per_s: float
    latency_s: float


class Cluster(Record, frozen=True, kw_only=True):
    """So many devices of one kind (`device` is the id of its data sheet) and the tiers that join them, the nearest first."""

    device: str
    num_devices: int
    tiers: tuple[Tier, ...]


class Layout(Record, frozen=True, kw_only=True):
    """How the work lies on the devices: `tensor` x `pipeline` x `data` of them.

    Ranks of a tensor group are neighbours, then those of data, then stages. `micro_batch` samples a micro-batch, of which each
    data rank has `global_batch / (data * micro_batch)` in a step. `shard` is what data ranks divide among themselves: 0 nothing,
    1 the optimizer's state, 2 gradients too, 3 weights too (ZeRO's stages; FSDP is 3). `is_sequence_parallel`: tensor ranks
    divide what lies between their products by tokens.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    schedule: ScheduleKind = "1f1b"
    chunks: int = 1
    recompute: Recompute = "none"
    shard: int = 0
    is_sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "micro_batch", "global_batch", "chunks"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; give a positive number")
        if self.shard not in (0, 1, 2, 3):
            raise PlanError(f"shard is {self.shard}; give 0, 1, 2 or 3")
        if self.global_batch % (self.data * self.micro_batch):
            raise PlanError(
                f"a global batch of {self.global_batch} is no multiple of {self.data} ranks x {self.micro_batch} samples"
            )
        if self.chunks > 1 and self.schedule != "interleaved":
            raise PlanError(f"{self.chunks} chunks a stage need the schedule 'interleaved', not '{self.schedule}'")

    @property
    def num_devices(self) -> int:
        """Devices that it takes."""
        return self.tensor * self.pipeline * self.data

    @property
    def num_micro_batches(self) -> int:
        """Of each data rank, in a step."""
        return self.global_batch // (self.data * self.micro_batch)


class Software(Record, frozen=True, kw_only=True):
    """How the program works, by which its operators and bytes are counted.

    `dtype` of products; `attention` 'fused' never writes scores, 'written' does, 'megatron' does with a fused softmax that takes
    groups of four (samples x heads) and falls back to single operators else. Operators are those of one layer as the host starts
    them. `optimizer_bytes` are read and written for each parameter at an update, `gradient_bytes` reduced.
    `pads_vocabulary`: to a multiple of 128 a tensor rank, when it is divided. `has_overlap`: gradients are reduced while the
    backward goes on. `state_bytes` are kept for each parameter by the optimizer, with a float32 copy of the weights if there is
    one.
    """

    dtype: str = "bfloat16"
    attention: Literal["fused", "written", "megatron"] = "fused"
    forward_operators: int = 20
    backward_operators: int = 30
    unfused_softmax_operators: int = 6
    gradient_bytes: int = 2
    optimizer_bytes: int = 30
    state_bytes: int = 12
    pads_vocabulary: bool = True
    has_overlap: bool = True


class Constants(Record, frozen=True, kw_only=True):
    """What a machine and its software reach, each with a meaning; the defaults are of an A100's size, and `calibrated` fits them.

    `product_share`        of the data sheet's rate, by large products whose tiles fill the device
    `misaligned_share`     of that, by products whose rows do not begin at multiples of 16 bytes
    `fill_depth`           depth that a tile's product takes to fill its pipeline, in numbers
    `memory_share`         of the data sheet's bandwidth, by operators that only read and write
    `kernel_s`             from the end of one kernel to the start of the next, on a device that is kept busy
    `operator_s`           of the host, to start one operator
    `collective_s`         of the host, to start one collective
    `link_share`           of a link's bandwidth, by large collectives
    `step_s`               of a step that belongs to nothing else: the loop, the schedule, the loader
    """

    product_share: float = 0.8
    misaligned_share: float = 0.3
    fill_depth: float = 64.0
    memory_share: float = 0.85
    kernel_s: float = 4e-6
    operator_s: float = 2e-5
    collective_s: float = 5e-5
    link_share: float = 0.7
    step_s: float = 2e-3


class StepTime(Record, frozen=True, kw_only=True):
    """Seconds of one step, and where they go: `total_s` is the sum of the others."""

    total_s: float
    compute_s: float
    host_s: float
    tensor_s: float
    bubble_s: float
    data_s: float
    optimizer_s: float
    step_s: float


class StageMemory(Record, frozen=True, kw_only=True):
    """Bytes on one device of a stage at its peak. `slack_bytes` is what allocators, the driver and libraries take besides."""

    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int
    logits_bytes: int
    buffer_bytes: int
    slack_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


class Ranked(Record, frozen=True, kw_only=True):
    """A layout, how long its step takes, and its fullest stage."""

    layout: Layout
    step: StepTime
    memory: StageMemory
    low_s: float
    high_s: float
    mfu: float


class StepFootprint(Record, frozen=True, kw_only=True):
    """Bytes of a step that ran on tensors without data.

    `weight_bytes` of parameters and `gradient_bytes` of those that are trained; `built_bytes` of all that was there before the
    first step, `kept_bytes` of all that stays between steps (the optimizer's state is the difference), `peak_bytes` at most.
    """

    weight_bytes: int
    gradient_bytes: int
    built_bytes: int
    kept_bytes: int
    peak_bytes: int
