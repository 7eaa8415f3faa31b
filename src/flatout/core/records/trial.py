"""Small declarative requests that a rule may make, and what came of them.

A rule states a hypothesis ("this product in float32 would be faster") as one of these records; the touching half runs it
for some tenths of a second on what was captured, and the result joins the Evidence.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, Union

from flatout.core.records.record import Record


def _tag(name: str) -> str:
    """The name of a request in files: 'time-in-dtype' for TimeInDtype."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


class TrialRequest(Record, frozen=True, kw_only=True, tag=_tag):
    """Base of all requests; each is run by the module of `flatout.check.trials` whose constant TRIAL names it."""


class TimeInDtype(TrialRequest, frozen=True, kw_only=True):
    """Replay these operators of the Evidence (by index) as captured, and with `old` replaced by `new`."""

    operators: tuple[int, ...]
    old: str
    new: str


class TimeAttention(TrialRequest, frozen=True, kw_only=True):
    """Attention written out against torch's scaled_dot_product_attention, at one shape.

    q is (batch, heads, q_len, head_dim), k and v are (batch, heads, kv_len, head_dim). Forward and backward when
    `backward`. `causal` and `masked` describe how the scores were masked; `dropout` is the probability on the weights.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    causal: bool
    masked: bool
    dropout: float
    backward: bool


class TimeGrowingCat(TrialRequest, frozen=True, kw_only=True):
    """`count` pieces appended one by one with torch.cat along `dim`, against one torch.cat at the end."""

    piece: tuple[int, ...]
    dim: int
    count: int
    dtype: str
    backward: bool


class TimeRecurrence(TrialRequest, frozen=True, kw_only=True):
    """`steps` calls of a recurrent cell, against one call of torch's layer over the whole sequence."""

    cell: Literal["GRUCell", "LSTMCell", "RNNCell"]
    batch: int
    steps: int
    input_size: int
    hidden_size: int
    backward: bool


class TimeNormalisation(TrialRequest, frozen=True, kw_only=True):
    """A normalisation over the last dimension written out, against torch's layer_norm ('layer') or rms_norm ('rms')."""

    kind: Literal["layer", "rms"]
    shape: tuple[int, ...]
    dtype: str
    backward: bool


class TimeActivation(TrialRequest, frozen=True, kw_only=True):
    """GELU written out, by tanh or by the error function, against torch's own."""

    kind: Literal["tanh", "erf"]
    shape: tuple[int, ...]
    dtype: str
    backward: bool


class TimeDistance(TrialRequest, frozen=True, kw_only=True):
    """Squared distances of all pairs of `batch` times `num_a` by `num_b` points in `dim` dimensions: differences written out,
    against torch.cdist.
    """

    batch: int
    num_a: int
    num_b: int
    dim: int
    dtype: str
    backward: bool


class TimeOneHot(TrialRequest, frozen=True, kw_only=True):
    """`rows` one-hot rows of `classes` numbers times a matrix of `width` columns, against looking the rows up."""

    rows: int
    classes: int
    width: int
    dtype: str
    backward: bool


class TimeOptimizer(TrialRequest, frozen=True, kw_only=True):
    """The optimizer (by index in Evidence.optimizers) on clones of its parameters: as it is, foreach, and fused."""

    optimizer: int


ModelVariant = Literal[
    "without-graph",
    "without-anomaly",
    "deterministic-off",
    "cropped",
    "batched",
    "frozen",
    "unpacked",
    "eager",
    "float32",
    "tf32",
    "bf16-autocast",
    "fp16-autocast",
    "bf16-weights",
    "channels-last",
    "flush-denormal",
    "threads",
    "steady",
]


class TimeModel(TrialRequest, frozen=True, kw_only=True):
    """One call of the captured root module (by index in Evidence.models) on captured inputs, against a variant.

    'without-graph': under no_grad. 'without-anomaly': anomaly detection off. 'deterministic-off': deterministic algorithms
    off. 'cropped': every tensor with `length` at dimension 1 cropped to `cropped_length`, or to each of `lengths` in turn: the
    result's `cured_s` is then the mean of one call, and its part 'new_length' the first call of a length, where that was
    timed. 'batched': the batch repeated
    `factor` times; the result's `cured_s` is then the time of one original batch (divided by the factor). 'frozen':
    parameters in modules that no optimizer trains (or in `modules`, unless empty) do not require gradients. 'unpacked':
    recurrent layers that get a packed sequence run on the padded batch. 'eager': a module under torch.compile, against itself
    without; refused where it would have to be compiled anew. 'float32': without autocast, parameters and inputs in float32.
    'tf32': float32 products may use TF32. 'bf16-autocast', 'fp16-autocast': forward under autocast to bfloat16, to float16,
    entered anew for each call. 'bf16-weights': parameters, buffers and inputs in bfloat16. 'channels-last': parameters and images
    in channels_last. 'flush-denormal': subnormal numbers count as zero. 'threads': with `factor` CPU threads. 'steady': the same
    call, for what it takes when calls follow one another without a pause.
    `num_live_outputs` calls follow one another and their outputs stay alive until the last, as the graph of a pass over several
    modules does.
    """

    model: int
    variant: ModelVariant
    backward: bool
    length: int = 0
    cropped_length: int = 0
    lengths: tuple[int, ...] = ()
    factor: int = 1
    num_live_outputs: int = 1
    modules: tuple[str, ...] = ()


class TimeCompiled(TrialRequest, frozen=True, kw_only=True):
    """One call of the captured root module (by index in Evidence.models) as it is, against the same under torch.compile.

    With `autocast`, a dtype, the call under autocast to it is timed beside them, compiled too where that gains anything. With
    `regions`, paths below the module ('blocks') of containers, only the blocks in these are compiled, each alone. `dynamic`: for
    changing shapes. `num_operators` of one call, forward and backward, tell beforehand how long compiling takes. The result's
    parts: 'compile', the seconds of the first call; 'autocast' and 'both', one call each.
    """

    model: int
    backward: bool
    num_operators: int = 0
    autocast: str = ""
    regions: tuple[str, ...] = ()
    dynamic: bool = False


class TimeDataset(TrialRequest, frozen=True, kw_only=True):
    """Fetch one batch of the loader (by index) in a copy of the process: items, collate, and indexing of ready tensors."""

    loader: int


class TimeDraws(TrialRequest, frozen=True, kw_only=True):
    """Fill a tensor with `bernoulli_`, as dropout does for its mask, against the same draws by vector instructions."""

    num_elements: int
    dtype: str


class TimeMostlyZeros(TrialRequest, frozen=True, kw_only=True):
    """A matrix (rows x columns) of which `density` (a fraction) are not zero: what is done with all of it, against those alone.

    'dropout': of all numbers, against those that are not zero, written into zeros. 'product': with a matrix of `width` columns,
    against the product of a sparse matrix. With the gradient of that matrix when `backward`.
    """

    task: Literal["dropout", "product"]
    rows: int
    columns: int
    width: int
    density: float
    dtype: str
    backward: bool


class TimePaddedProduct(TrialRequest, frozen=True, kw_only=True):
    """A product (batch x rows x inner by inner x columns) against the same with sizes (rows, inner, columns) `padded`.

    `transposed` marks the factor that lies in memory transposed, as a weight's `.t()` does.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    padded: tuple[int, int, int]
    dtype: str
    transposed: tuple[bool, bool]


class TimeGraphBreak(TrialRequest, frozen=True, kw_only=True):
    """What one graph break costs the host here: a row of small operators compiled in two graphs, against one.

    The backend is 'aot_eager', so that both run the same kernels and only what surrounds a graph differs. Forward and backward
    when `backward`.
    """

    backward: bool


class TimeAttentionCall(TrialRequest, frozen=True, kw_only=True):
    """A call of torch's scaled_dot_product_attention as it was, against the same call with one argument changed.

    q is (batch, heads, q_len, head_dim), k and v are (batch, heads, kv_len, head_dim). `masked`: with a dense mask of the
    dtype. `cure`: 'causal' puts is_causal=True in place of the mask, 'no-mask' leaves it out, 'no-dropout' sets dropout_p=0.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    masked: bool
    dropout: float
    backward: bool
    cure: Literal["causal", "no-mask", "no-dropout"]


class TimeMergedLinears(TrialRequest, frozen=True, kw_only=True):
    """Linear layers on one input of (rows, in_features), one by one, against one product that is split afterwards."""

    rows: int
    in_features: int
    out_features: tuple[int, ...]
    dtype: str
    bias: bool
    backward: bool


class TimeLoraLinear(TrialRequest, frozen=True, kw_only=True):
    """A linear layer and its low-rank adapter on one input of (rows, in_features), multiplied apart, against one product with the
    adapter added to the weight. A `frozen` weight gets no gradient.
    """

    rows: int
    in_features: int
    out_features: int
    rank: int
    dtype: str
    bias: bool
    frozen: bool
    backward: bool


class TimeStackedLinears(TrialRequest, frozen=True, kw_only=True):
    """`num` linear layers on inputs of (rows, in_features) each, one by one, against one batched product."""

    num: int
    rows: int
    in_features: int
    out_features: int
    dtype: str
    bias: bool
    backward: bool


class TimeForeach(TrialRequest, frozen=True, kw_only=True):
    """These operators (by index) called tensor by tensor as captured, against torch's foreach functions over all tensors."""

    operators: tuple[int, ...]


class TimeSparseEmbedding(TrialRequest, frozen=True, kw_only=True):
    """An embedding's lookup, backward and update with its gradient dense, against sparse=True.

    `operator` is the index of the dense backward (its indices are replayed), `optimizer` that of the optimizer that holds
    the table. Part 'touched': rows of the table that the batch reads.
    """

    operator: int
    optimizer: int


class TimeStrides(TrialRequest, frozen=True, kw_only=True):
    """The copy (by index of the operator) and the operator `reader` on the copy, against `reader` on the strided original.

    `argument` is the position of the copy among the reader's tensor arguments.
    """

    copy: int
    reader: int
    argument: int


class TimeWorkers(TrialRequest, frozen=True, kw_only=True):
    """Run the loader (by index) for some batches with each of these numbers of worker processes.

    Between batches the model (by index in Evidence.models, -1: none) does its work on captured inputs, with a backward when
    `backward`; without a model, or on a device, the loop waits `work_s` instead.
    """

    loader: int
    counts: tuple[int, ...]
    model: int = -1
    backward: bool = True
    work_s: float = 0.0


if TYPE_CHECKING:
    Trial = TrialRequest
else:
    Trial = Union[tuple(TrialRequest.__subclasses__())]  # noqa: UP007  # what a file holds is known by its tag
"""Any of the requests above."""


class TrialResult(Record, frozen=True, kw_only=True):
    """What a trial measured, in seconds for one execution of the request, as medians.

    `refused` is the reason why nothing was measured (both times are None then), `is_out_of_time` where that is the time alone.
    `spread_fraction` is the relative interquartile
    range of the slower variant. `variant` names the winner where a trial compared several. `error` is the largest
    absolute difference between the results of both variants, relative to the largest value, where it was compared.
    `parts` holds further measured seconds by name, `facts` yes/no findings of the trial.
    """

    trial: Trial
    now_s: float | None = None
    cured_s: float | None = None
    spread_fraction: float = 0.0
    variant: str = ""
    error: float | None = None
    refused: str = ""
    is_out_of_time: bool = False
    parts: dict[str, float] = {}
    facts: dict[str, bool] = {}
