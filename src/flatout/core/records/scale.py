"""What a run on many devices is made of: a model's sizes, the devices and what joins them, a layout, how the software works."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import force_setattr

from flatout.core.errors import PlanError
from flatout.core.records.record import Record

Recompute = Literal["none", "selective", "operators", "parts", "full"]
"""What a backward computes again: nothing; attention; what lies between products, and every other product (torch's selective
checkpointing of operators, as torchtitan does); parts that are named; or whole layers."""
RecomputedPart = Literal["attention", "norms", "gates", "latent", "feed-forward", "experts"]
"""Parts of a layer that can be computed again alone, as Megatron-Core's recompute_modules: attention (core_attn), norms
(layernorm), the function between a feed-forward's products (moe_act), what makes queries, keys and values of latent vectors
(mla_up_proj), a dense feed-forward (mlp), and all experts (moe).
"""
HalfPart = Literal["attention", "latent-experts"]
"""Parts whose products stay in half precision where others have fewer bits: attention's, and what makes vectors for experts
shorter and long again."""
ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"]
"""Schedules of torch.distributed.pipelining; zero-bubble is its interleaved one."""
Offload = Literal["none", "state", "weights"]
Compression = Literal["none", "bfloat16", "powersgd", "sign"]
LOOPED = frozenset({"interleaved", "looped-bfs", "zero-bubble"})
"""Schedules whose stages hold `chunks` parts of the model, rank 0 the first of each round."""
SPLIT = frozenset({"zero-bubble", "zbv", "dualpipev"})
"""Schedules whose backward is in two halves: gradients of inputs, then of weights. torch 2.11 to 2.13 loses gradients of the last
stage in them where weights are sharded and gathered again for the backward (shard 3)."""
FOLDED = frozenset({"zbv", "dualpipev"})
"""Schedules whose stages hold two parts, the second in reverse order: rank 0 has the first and the last."""


class StateSpace(Record, frozen=True, kw_only=True):
    """Sizes of a state-space mixer (Mamba-2; Dao and Gu, 2024): `heads` of `head_dim` channels, each of which has a state of
    `size` numbers; heads of one of `groups` share what goes in and out of their states. A convolution goes over `conv` tokens,
    and states are written once in `chunk` tokens."""

    heads: int
    head_dim: int
    size: int
    groups: int = 1
    conv: int = 4
    chunk: int = 128

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise PlanError(f"state.{name} is {getattr(self, name)}; give a positive number")
        if self.heads % self.groups:
            raise PlanError(f"state.heads {self.heads} are no multiple of state.groups {self.groups}")

    @property
    def inner(self) -> int:
        """Channels of all heads together."""
        return self.heads * self.head_dim


class CompressedKeys(Record, frozen=True, kw_only=True):
    """Attention to keys of which several were made one (DeepSeek-V4, 2026), besides those of a window.

    `ratios` has for each layer how many keys become one (0: none is compressed). Where that is one of `indexed`, a query sees no
    more than `selected` of them, which `index_heads` of length `index_dim` choose.
    """

    ratios: tuple[int, ...]
    indexed: tuple[int, ...] = ()
    selected: int = 0
    index_heads: int = 0
    index_dim: int = 0

    def __post_init__(self) -> None:
        if any(ratio < 0 for ratio in self.ratios):
            raise PlanError(f"compressed.ratios has {min(self.ratios)}; give 0 or more for each layer")
        if unknown := sorted(set(self.indexed) - set(self.ratios)):
            raise PlanError(f"compressed.indexed has {unknown[0]}, which no layer of compressed.ratios has")
        if self.indexed and min(self.selected, self.index_heads, self.index_dim) < 1:
            raise PlanError("compressed.indexed needs selected, index_heads and index_dim: give positive numbers")


class ModelShape(Record, frozen=True, kw_only=True):
    """A decoder-only model by its sizes. `ffn` None means 4 x hidden; `kv_heads` None as many as heads.

    `is_gated`: the feed-forward has three matrices (SwiGLU). `is_tied`: the output layer is the embedding. `head_dim` of queries
    and keys is hidden / heads unless given, and that of values as much.

    Latent attention (DeepSeek-V2, 2024, section 2.1) has keys and values of one vector of `key_rank` numbers a token, queries of
    one of `query_rank` (0: of the token itself), and `rope_dim` further numbers of queries and keys for their positions. With
    `shares_keys` values are the keys. With `out_rank`, `out_groups` of the heads' results become so many numbers each before the
    last product.

    A layer has `num_experts` feed-forwards of width `expert_ffn` (None: ffn), of which a token takes `experts_per_token`; all
    take `shared_experts` more, of width `shared_ffn` (None: as an expert). `dense_layers` at the beginning have one of width
    `ffn` instead. A token goes to experts of `expert_groups` nodes at most (0: of any number), as a vector of `expert_hidden`
    numbers (None: hidden; LatentMoE).

    Attention sees the last `window` tokens (0: all of them), but for each `full_every`th layer, which sees all (0: none does),
    and compressed keys where there are such. `extra_tokens` more are predicted, each by a layer, a product of 2 x hidden with
    hidden, and the output layer (DeepSeek-V3, 2024, section 2.2). Layers have `streams` of the residual (hyper-connections).

    Hybrid models have a `pattern` instead of layers that are all alike: a letter for each layer, which is M a state-space mixer,
    * attention, - a feed-forward or E experts (Nemotron-H's hybrid_override_pattern). `extra_pattern` has the same for those that
    predict a further token ("": the last of the layers).
    """

    hidden: int
    layers: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int | None = None
    head_dim: int | None = None
    query_rank: int = 0
    key_rank: int = 0
    rope_dim: int = 0
    ffn: int | None = None
    is_gated: bool = False
    num_experts: int = 1
    experts_per_token: int = 1
    expert_ffn: int | None = None
    shared_experts: int = 0
    shared_ffn: int | None = None
    expert_hidden: int | None = None
    dense_layers: int = 0
    expert_groups: int = 0
    window: int = 0
    full_every: int = 0
    extra_tokens: int = 0
    is_tied: bool = True
    shares_keys: bool = False
    out_rank: int = 0
    out_groups: int = 1
    streams: int = 1
    pattern: str = ""
    extra_pattern: str = ""
    state: StateSpace | None = None
    compressed: CompressedKeys | None = None

    def __post_init__(self) -> None:
        for name in (
            *("hidden", "layers", "heads", "vocab", "seq", "num_experts", "experts_per_token"),
            *("out_groups", "streams"),
        ):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; give a positive number")
        for name in (
            *("query_rank", "key_rank", "rope_dim", "shared_experts", "dense_layers", "expert_groups"),
            *("window", "full_every", "extra_tokens", "out_rank"),
        ):
            if getattr(self, name) < 0:
                raise PlanError(f"{name} is {getattr(self, name)}; give 0 or more")
        for name in ("head_dim", "ffn", "expert_ffn", "kv_heads", "shared_ffn", "expert_hidden"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; give a positive number, or leave it out")
        if self.head_dim is None and self.hidden % self.heads:
            raise PlanError(f"hidden {self.hidden} is no multiple of heads {self.heads}; give head_dim")
        if self.heads % self.key_heads:
            raise PlanError(f"heads {self.heads} are no multiple of kv_heads {self.kv_heads}")
        if self.experts_per_token > self.num_experts:
            raise PlanError(f"a token takes {self.experts_per_token} experts, and there are {self.num_experts}")
        if self.dense_layers > self.layers:
            raise PlanError(f"dense_layers {self.dense_layers} are more than layers {self.layers}")
        if self.num_experts == 1 and (self.shared_experts or self.dense_layers or self.expert_groups):
            raise PlanError("shared_experts, dense_layers and expert_groups are of models with num_experts")
        if self.num_experts == 1 and (self.shared_ffn or self.expert_hidden):
            raise PlanError("shared_ffn and expert_hidden are of models with num_experts")
        if self.rope_dim and not self.key_rank:
            raise PlanError("rope_dim is of latent attention; give key_rank, too")
        if self.heads % self.out_groups:
            raise PlanError(f"heads {self.heads} are no multiple of out_groups {self.out_groups}")
        if self.compressed is not None and len(self.compressed.ratios) != self.layers:
            raise PlanError(
                f"compressed.ratios has {len(self.compressed.ratios)} numbers; give one for each of {self.layers} layers"
            )
        self._check_patterns()

    def _check_patterns(self) -> None:
        for name in ("pattern", "extra_pattern"):
            letters = getattr(self, name)
            if unknown := sorted(set(letters) - set("M*-E")):
                raise PlanError(
                    f"{name} has '{unknown[0]}'; letters are M (state space), * (attention), - (feed-forward), E (experts)"
                )
            if "M" in letters and self.state is None:
                raise PlanError(f"{name} has M, a state-space mixer; give its sizes in [state]")
            if "E" in letters and self.num_experts == 1:
                raise PlanError(f"{name} has E, experts; give num_experts")
        if self.pattern and len(self.pattern) != self.layers:
            raise PlanError(f"pattern has {len(self.pattern)} letters; give one for each of {self.layers} layers")
        if self.pattern and (self.window or self.dense_layers or self.compressed):
            raise PlanError(
                "window, dense_layers and compressed are of layers that are alike; leave pattern out, or those"
            )
        if self.state is not None and "M" not in self.pattern + self.extra_pattern:
            raise PlanError("[state] is of layers M of a pattern, and there is none")
        if self.extra_pattern and not self.extra_tokens:
            raise PlanError("extra_pattern is of what predicts further tokens; give extra_tokens, too")

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        """Width between the two products of a feed-forward that is no expert."""
        return self.ffn or 4 * self.hidden

    @property
    def expert_inner(self) -> int:
        """Width between the two products of an expert."""
        return self.expert_ffn or self.inner

    @property
    def shared_inner(self) -> int:
        """Width of all experts together that every token takes."""
        return self.shared_experts * (self.shared_ffn or self.expert_inner)

    @property
    def expert_width(self) -> int:
        """Length of the vectors that experts take and give."""
        return self.expert_hidden or self.hidden

    @property
    def head_width(self) -> int:
        """Length of one head's vectors of values."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Length of one head's vectors of queries and keys."""
        return self.head_width + self.rope_dim


class Tier(Record, frozen=True, kw_only=True):
    """What joins groups of devices: all within `reach` devices are joined by it. `bytes_per_s` out of one device, one direction;
    `latency_s` of one message."""

    name: str
    reach: int
    bytes_per_s: float
    latency_s: float


class Host(Record, frozen=True, kw_only=True):
    """What a device has of the machine around it: `bytes_per_s` to and from the host's memory, one direction; of its disk,
    reading or writing; the host's memory for each device, None where it is unknown."""

    bytes_per_s: float
    disk_bytes_per_s: float
    memory_bytes: float | None = None


class Cluster(Record, frozen=True, kw_only=True):
    """So many devices of one kind (`device` is the id of its data sheet) and the tiers that join them, the nearest first.

    `host` None: nothing can be offloaded.
    """

    device: str
    num_devices: int
    tiers: tuple[Tier, ...]
    host: Host | None = None


class Layout(Record, frozen=True, kw_only=True):
    """How the work lies on the devices: `tensor` x `context` x `data` x `pipeline` of them.

    Ranks of a tensor group are neighbours, then those of context, then those of data, then stages. `micro_batch` samples a
    micro-batch, of which each data rank has `global_batch / (data * micro_batch)` in a step. `shard` is what data (and context)
    ranks divide among themselves: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too (ZeRO's stages; FSDP is 3);
    groups of `shard_ranks` of the data ranks do so and hold copies of one another (HSDP; 0 is all of them).
    `is_sequence_parallel`: tensor ranks divide what lies between their products by tokens. `context` ranks divide each sample by
    tokens. `expert` ranks divide the experts, and each expert lies on `expert_tensor` ranks (0: as many as divide tensors):
    together they divide the ranks of tensor, context and data. `recompute` is of all layers, or of `recompute_layers` of each
    part of a stage (0: all), or of the parts that `recomputed` names. `counts_ends`: embedding and output layer count as a layer
    each when stages get their layers. `offload` keeps the optimizer's state, or weights too, in the host's memory or on its disk
    (`offload_to`). Activations of `offload_layers`
    layers of each part of a stage wait in the host's memory for their backward. `compression` of gradients between data ranks.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 0
    micro_batch: int = 1
    global_batch: int = 1
    schedule: ScheduleKind = "1f1b"
    chunks: int = 1
    recompute: Recompute = "none"
    recompute_layers: int = 0
    recomputed: tuple[RecomputedPart, ...] = ()
    counts_ends: bool = False
    shard: int = 0
    shard_ranks: int = 0
    is_sequence_parallel: bool = False
    offload: Offload = "none"
    offload_to: Literal["host", "disk"] = "host"
    offload_layers: int = 0
    compression: Compression = "none"

    def __post_init__(self) -> None:
        for name in ("tensor", "context", "pipeline", "data", "expert", "micro_batch", "global_batch", "chunks"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; give a positive number")
        if self.shard not in (0, 1, 2, 3):
            raise PlanError(f"shard is {self.shard}; give 0, 1, 2 or 3")
        if self.shard_ranks < 0 or (self.shard_ranks and self.data % self.shard_ranks):
            raise PlanError(
                f"shard_ranks {self.shard_ranks} does not divide data {self.data}; give a divisor, or 0 for all"
            )
        force_setattr(self, "recomputed", tuple(self.recomputed))  # a list from JSON would not be hashed
        if bool(self.recomputed) != (self.recompute == "parts"):
            raise PlanError("recomputed names the parts of recompute 'parts': give both, or neither")
        if self.expert_tensor < 0 or self.recompute_layers < 0 or self.offload_layers < 0:
            raise PlanError("expert_tensor, recompute_layers and offload_layers are 0 or more")
        if self.tensor % self.expert_ranks:
            raise PlanError(f"expert_tensor {self.expert_tensor} does not divide tensor {self.tensor}")
        if self.tensor * self.context * self.data % (self.expert * self.expert_ranks):
            raise PlanError(
                f"expert {self.expert} x {self.expert_ranks} does not divide tensor {self.tensor} x context {self.context} x "
                f"data {self.data}: experts lie on these ranks"
            )
        if self.global_batch % (self.data * self.micro_batch):
            raise PlanError(
                f"a global batch of {self.global_batch} is no multiple of {self.data} ranks x {self.micro_batch} samples"
            )
        if self.chunks > 1 and self.schedule not in LOOPED:
            raise PlanError(
                f"{self.chunks} chunks a stage need a schedule of {', '.join(sorted(LOOPED))}, not '{self.schedule}'"
            )
        if self.compression != "none" and (self.shard or self.data == 1):
            raise PlanError(
                f"compression '{self.compression}' is of gradients that data ranks reduce whole: it needs shard 0 and data > 1, "
                f"not shard {self.shard} and data {self.data}"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices that the layout takes."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def expert_ranks(self) -> int:
        """Ranks on which each expert lies."""
        return self.expert_tensor or self.tensor

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that each data rank runs in a step."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def sharing(self) -> int:
        """Ranks that divide among themselves what `shard` names."""
        return self.context * (self.shard_ranks or self.data)

    @property
    def parts_per_stage(self) -> int:
        """Parts of the model that one pipeline rank holds."""
        return 2 if self.schedule in FOLDED and self.pipeline > 1 else self.chunks


class MeasuredStep(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step of a model in a layout that was measured: seconds, and the bytes that each rank's allocator gave out at most.

    `host_layer_s` is what the slowest rank's host took then, between the steps, for the forward and backward of one layer of a
    tiny model. Without seconds, why it could not be run. `host_s`, a loop over one small operator, is of earlier files and not
    used: neighbours that fill the processor's caches slow a step's host down, and such a loop hardly.
    """

    model: ModelShape
    layout: Layout
    seconds: float | None = None
    host_s: float | None = None
    host_layer_s: float | None = None
    peak_bytes: tuple[int, ...] | None = None
    why: str = ""


class Software(Record, frozen=True, kw_only=True):
    """How the program works, by which its operators and bytes are counted.

    `dtype` of products, but for those of `half_parts` and of `half_layers` of all layers, which stay in half precision where it
    has fewer bits; `attention` 'fused' never writes scores, 'written' does, 'megatron' does with a fused softmax that takes
    groups of four (samples x heads) and falls back to single operators else. Operators are those of one layer as the host starts
    them. `stops_early`: what is computed again ends before a layer's last product, which no gradient needs
    (torch.utils.checkpoint without reentrance, since torch 2.1). `optimizer_bytes` are read and written for each parameter at an
    update, `gradient_bytes` reduced. `pads_vocabulary`: to a multiple of 128 a tensor rank, when it is divided. `has_overlap`:
    gradients are reduced while the backward goes on. `state_bytes` are kept for each parameter by the optimizer, with a float32
    copy of the weights if there is one. Context ranks gather all keys and values before attention ('gathered'), or pass them
    round while it goes on ('ring'); their pieces of a sample are 'contiguous', so that under a causal mask the last rank has the
    most to do, or 'balanced'. Tensor ranks divide a layer by what its code says, or by tensors that know how they are divided
    (`divided_by`). A layer's sharded weights lie in one 'buffer', or each 'weight' is handled by itself; updating it takes
    `update_operators` of the host, on tensors that know how they are divided, and reducing its gradient by itself
    `reduce_operators`. `recompute_operators` is what computing a region
    again takes of the host besides its operators, and `end_operators` what embedding, head and loss take in each direction.
    On one device alone products are cast by autocast, and what flows between layers is in float32 (`autocast_alone`).
    Dropout (`has_dropout`) keeps masks; a gate that is no one kernel (`fuses_gate`) keeps what its function gives; a loss has
    `loss_bytes` for each logit at once, besides the logit. Casts to fewer bits go through memory `cast_passes` times as often as
    fused ones; weights are cast for each micro-batch, or `casts_weights_once` a step. Gradients and state are of a share
    `trained_share` of the parameters, as with LoRA, whose adapters of `adapter_rank` (0: there are none) lie beside each product,
    or beside that of 'queries', keys and values alone (`adapted`), and read and write what it takes and gives. `kernels` names
    those of fused attention, by which the device's data sheet says what they reach ('' for today's). A router takes
    `routing_operators` of the host, and each expert of a rank `expert_operators` where experts are not started together, and
    twice as many backward. Of the collectives of tensor ranks a share `tensor_hidden` is hidden behind products, as far as these
    last (asynchronous tensor parallelism), those of experts behind another micro-batch (`hides_experts`). A token goes once to
    each node that has experts for it (`sends_once`), in numbers of `dispatch_bytes` (0: as wide as others), and comes back as
    wide as others. What lies between products reads and writes `traffic` times what it would in fused kernels, in layers of gates
    and RMS norms `gated_traffic` times (0: as often), in layers with experts `expert_traffic` times as much again. Weights that
    are sharded between steps are gathered beside the first forward (`gathers_ahead`); weights of products in 8 bits are sent in 8
    bits (`gathers_eight`). `program` says whose schedules and ways to recompute a search may use: torch's, Megatron's of 2021,
    Megatron-Core's, or ('') this project's."""

    program: Literal["", "torch", "megatron", "megatron-core"] = ""
    dtype: str = "bfloat16"
    half_parts: tuple[HalfPart, ...] = ()
    half_layers: int = 0
    attention: Literal["fused", "written", "megatron"] = "fused"
    kernels: str = ""
    traffic: float = 1.0
    gated_traffic: float = 0.0
    forward_operators: int = 20
    backward_operators: int = 30
    unfused_softmax_operators: int = 6
    recompute_operators: int = 4
    stops_early: bool = False
    end_operators: int = 0
    update_operators: float = 0.0
    reduce_operators: float = 1.0
    gradient_bytes: int = 2
    optimizer_bytes: int = 30
    state_bytes: int = 12
    pads_vocabulary: bool = True
    has_overlap: bool = True
    gathers_ahead: bool = False
    gathers_eight: bool = False
    context_exchange: Literal["gathered", "ring"] = "gathered"
    context_pieces: Literal["contiguous", "balanced"] = "contiguous"
    divided_by: Literal["code", "tensors"] = "code"
    shards_by: Literal["buffer", "weight"] = "buffer"
    has_dropout: bool = True
    fuses_gate: bool = True
    autocast_alone: bool = False
    loss_bytes: int = 8
    cast_passes: float = 1.0
    casts_weights_once: bool = False
    trained_share: float = 1.0
    adapter_rank: int = 0
    adapted: Literal["all", "queries"] = "all"
    routing_operators: int = 20
    expert_operators: int = 0
    tensor_hidden: float = 0.0
    hides_experts: bool = False
    sends_once: bool = False
    dispatch_bytes: int = 0
    expert_traffic: float = 1.0


class Constants(Record, frozen=True, kw_only=True):
    """What a machine and its software reach, each with a meaning; the defaults are of an A100's size, and `calibrated` fits them.

    `product_share`        of the data sheet's rate, by large products whose tiles fill the device
    `misaligned_share`     of that, by products whose rows do not begin at multiples of 16 bytes
    `fill_s`               a tile's product of 256 x 128 numbers, before its first operands have come and after its last: 64
                           numbers' depth at an A100's rate, and the same on faster devices, as memory answers no sooner there
    `attention_share`      of the data sheet's rate, by fused attention: by FlashAttention-2 on an A100 (Dao, 2023, figures 4
                           to 6)
    `attention_backward_share`  the same by its backward
    `memory_share`         of the data sheet's bandwidth, by operators that only read and write
    `kernel_s`             from the end of one kernel to the start of the next, on a device that is kept busy
    `operator_s`           of the host, to start one operator
    `divided_operator_s`   the same on tensors that know how they are divided: DTensor works it out in Python each time
    `collective_s`         of the host, to start one collective
    `link_share`           of the nearest links' bandwidth, by large collectives
    `fabric_share`         of the bandwidth of those beyond: steps of one node say nothing of it
    `step_s`               of a step that belongs to nothing else: the loop, the schedule, the loader
    `contention_share`     of the time in which arithmetic and collectives run side by side, lost by the arithmetic: 18.9 % in
                           the mean of GPT and LLaMA models on four A100, H100, MI210 or MI250, 40 % at most (Characterizing
                           Compute-Communication Overlap, arXiv 2507.03114, 2025)
    `routing_imbalance`    tokens of the fullest expert rank over their mean: what Switch Transformer's capacity factor allows
                           (Fedus et al., 2022, section 2.2); what is more it drops
    `host_share`           of the data sheet's bandwidth to the host, by copies of pinned memory: PCIe's packets of 128 or 256
                           bytes carry 24 to 28 bytes of heads (PCI Express base specification, transaction and link layers)
    `straggler_share`      deviation of a rank's own seconds, over their mean. 0: the other constants come from steps of whole
                           nodes, which have their waiting inside. GPUs of one kind differ by 8 % in the mean of five clusters
                           (Sinha et al., Not all GPUs are created equal, SC 2022)
    """

    product_share: float = 0.8
    misaligned_share: float = 0.3
    fill_s: float = 1.8e-6
    attention_share: float = 0.58
    attention_backward_share: float = 0.5
    memory_share: float = 0.85
    kernel_s: float = 4e-6
    operator_s: float = 2e-5
    divided_operator_s: float = 2e-4
    collective_s: float = 5e-5
    link_share: float = 0.7
    fabric_share: float = 0.7
    step_s: float = 2e-3
    contention_share: float = 0.19
    routing_imbalance: float = 1.25
    host_share: float = 0.85
    straggler_share: float = 0.0


class StepTime(Record, frozen=True, kw_only=True):
    """Seconds of one step, and where they go: `total_s` is the sum of the others.

    `host_s` the device waits for the host's operators; a layer waits for the collectives `tensor_s`, `context_s` and `expert_s`;
    `data_s` is what data ranks send beyond what arithmetic hides, and what arithmetic loses beside it; `offload_s` what copies
    to and from the host or disk take beyond what is hidden; `straggler_s` waits for the slowest rank.
    """

    total_s: float
    compute_s: float
    host_s: float
    tensor_s: float
    bubble_s: float
    data_s: float
    optimizer_s: float
    step_s: float
    context_s: float = 0.0
    expert_s: float = 0.0
    offload_s: float = 0.0
    straggler_s: float = 0.0


class StageMemory(Record, frozen=True, kw_only=True):
    """Bytes on one device of a stage at its peak.

    `slack_bytes` is what allocators, the driver and libraries take besides, `feedback_bytes` what compressed gradients left out
    and bring in later. `host_bytes` lie in the host's memory or on its disk, and are none of the device's.
    """

    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int
    logits_bytes: int
    buffer_bytes: int
    slack_bytes: int
    feedback_bytes: int = 0
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All that is on the device."""
        return sum(int(getattr(self, name)) for name in self.__struct_fields__) - self.host_bytes


class Ranked(Record, frozen=True, kw_only=True):
    """A layout, how long its step takes, and its fullest stage."""

    layout: Layout
    step: StepTime
    memory: StageMemory
    low_s: float
    high_s: float
    mfu: float


class ParetoLayout(Record, frozen=True, kw_only=True):
    """A layout on so many devices, and what a step of it costs: seconds of all devices together, and joules at the limit of their
    power (None where the data sheet has none).
    """

    num_devices: int
    ranked: Ranked
    device_s: float
    energy_j: float | None = None


class ParetoLayouts(Record, frozen=True, kw_only=True):
    """Layouts of a model on several numbers of devices that no other beats in seconds, memory and devices."""

    model: ModelShape
    global_batch: int
    rows: tuple[ParetoLayout, ...]


_LEAST_SLACK = 2**30
"""What the driver's context and libraries take at least."""


_OVERCOUNT = 0.05
"""Of what is counted, what programs are known to keep less: of steps that ran, counts were up to so much above the room, where
the layout was published whole (bench/planner.py)."""


class Price(Record, frozen=True, kw_only=True):
    """What one layout costs: seconds of a step with an interval, each stage's memory, and what that follows from.

    `mfu` counts a token's products with the weights it meets and causal attention once, forward and backward; `mfu_whole` counts
    attention as if it were not causal, as PaLM does (Chowdhery et al., 2022, appendix B); `hfu` counts what is computed again,
    too. All are shares of the data sheet's rate for the type of the products.
    """

    model: ModelShape
    layout: Layout
    cluster: Cluster
    software: Software
    constants: Constants
    step: StepTime
    low_s: float
    high_s: float
    tokens_per_s: float
    mfu: float
    mfu_whole: float
    hfu: float
    stages: tuple[StageMemory, ...]
    room_bytes: float
    assumptions: tuple[str, ...] = ()

    @property
    def fullest(self) -> StageMemory:
        """The stage whose device holds the most."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def does_fit(self) -> bool:
        """Whether each stage's device has the room, with all that allocators and libraries may take besides."""
        return self.fullest.total_bytes <= self.room_bytes

    @property
    def is_too_large(self) -> bool:
        """Whether what is counted exceeds the room even where allocators and libraries take least, and less is kept than
        counted."""
        counted = self.fullest.total_bytes - self.fullest.slack_bytes
        return (1 - _OVERCOUNT) * counted + _LEAST_SLACK > self.room_bytes


class StepFootprint(Record, frozen=True, kw_only=True):
    """Bytes of a step that ran on tensors without data.

    `weight_bytes` of parameters and `gradient_bytes` of those that are trained; `built_bytes` of all that was there before the
    first step, `persistent_bytes` of all that stays between steps (the difference is the optimizer's state), and `peak_bytes`.
    """

    weight_bytes: int
    gradient_bytes: int
    built_bytes: int
    persistent_bytes: int
    peak_bytes: int
