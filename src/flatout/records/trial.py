"""Small declarative requests that a rule may make, and what came of them.

A rule states a hypothesis ("this product in float32 would be faster") as one of these records; the touching half runs it
for some tenths of a second on what was captured, and the result joins the Evidence.
"""

from __future__ import annotations

from typing import Literal

from flatout.records.record import Record


class TimeInDtype(Record, frozen=True, kw_only=True, tag="time-in-dtype"):
    """Replay these operators of the Evidence (by index) as captured, and with `old` replaced by `new`."""

    operators: tuple[int, ...]
    old: str
    new: str


class TimeAttention(Record, frozen=True, kw_only=True, tag="time-attention"):
    """Attention written out against torch's scaled_dot_product_attention, at one shape.

    q is (batch, heads, q_len, head_dim), k and v are (batch, heads, kv_len, head_dim). Forward and backward when
    `backward`. `causal` and `masked` say how the scores were masked; `dropout` is the probability on the weights.
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


class TimeGrowingCat(Record, frozen=True, kw_only=True, tag="time-growing-cat"):
    """`count` pieces appended one by one with torch.cat along `dim`, against one torch.cat at the end."""

    piece: tuple[int, ...]
    dim: int
    count: int
    dtype: str
    backward: bool


class TimeRecurrence(Record, frozen=True, kw_only=True, tag="time-recurrence"):
    """`steps` calls of a recurrent cell, against one call of torch's layer over the whole sequence."""

    cell: Literal["GRUCell", "LSTMCell", "RNNCell"]
    batch: int
    steps: int
    input_size: int
    hidden_size: int
    backward: bool


class TimeNormalisation(Record, frozen=True, kw_only=True, tag="time-normalisation"):
    """A normalisation over the last dimension written out, against torch's layer_norm ('layer') or rms_norm ('rms')."""

    kind: Literal["layer", "rms"]
    shape: tuple[int, ...]
    dtype: str
    backward: bool


class TimeDistance(Record, frozen=True, kw_only=True, tag="time-distance"):
    """Squared distances of all pairs of `batch` times `num_a` by `num_b` points in `dim` dimensions: differences written out,
    against torch.cdist.
    """

    batch: int
    num_a: int
    num_b: int
    dim: int
    dtype: str
    backward: bool


class TimeOneHot(Record, frozen=True, kw_only=True, tag="time-one-hot"):
    """`rows` one-hot rows of `classes` numbers times a matrix of `width` columns, against looking the rows up."""

    rows: int
    classes: int
    width: int
    dtype: str
    backward: bool


class TimeOptimizer(Record, frozen=True, kw_only=True, tag="time-optimizer"):
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
]


class TimeModel(Record, frozen=True, kw_only=True, tag="time-model"):
    """One call of the captured root module (by index in Evidence.models) on captured inputs, against a variant.

    'without-graph': under no_grad. 'without-anomaly': anomaly detection off. 'deterministic-off': deterministic algorithms
    off. 'cropped': every tensor with `length` at dimension 1 cropped to `cropped_length`. 'batched': the batch repeated
    `factor` times; the result's `cured_s` is then the time of one original batch (divided by the factor). 'frozen':
    parameters in modules that no optimizer trains do not require gradients. 'unpacked': recurrent layers that get a packed
    sequence run on the padded batch. 'eager': a module under torch.compile, against itself without; refused where compiled
    code would have to be made anew. `held` calls are made in a row and their outputs
    kept until the last, as a pass over several modules keeps its graph.
    """

    model: int
    variant: ModelVariant
    backward: bool
    length: int = 0
    cropped_length: int = 0
    factor: int = 1
    held: int = 1


class TimeDataset(Record, frozen=True, kw_only=True, tag="time-dataset"):
    """Fetch one batch of the loader (by index) in the main process: items, collate, and indexing of ready tensors."""

    loader: int


class TimePaddedProduct(Record, frozen=True, kw_only=True, tag="time-padded-product"):
    """A product (batch x rows x inner by inner x columns) against the same with sizes (rows, inner, columns) `padded`.

    `transposed` says which factor lies in memory the other way round, as a weight's `.t()` does.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    padded: tuple[int, int, int]
    dtype: str
    transposed: tuple[bool, bool]


class TimeGraphBreak(Record, frozen=True, kw_only=True, tag="time-graph-break"):
    """What one graph break costs the host here: a chain of small operators compiled in two graphs, against one.

    The backend is 'aot_eager', so that both run the same kernels and only what surrounds a graph differs. Forward and backward
    when `backward`.
    """

    backward: bool


Trial = (
    TimeInDtype
    | TimeAttention
    | TimeGrowingCat
    | TimeRecurrence
    | TimeNormalisation
    | TimeDistance
    | TimeOneHot
    | TimeOptimizer
    | TimeModel
    | TimeGraphBreak
    | TimeDataset
    | TimePaddedProduct
)


class TrialResult(Record, frozen=True, kw_only=True):
    """What a trial measured, in seconds for one execution of the request, as medians.

    `refused` says why nothing was measured (both times are None then). `spread_fraction` is the relative interquartile
    range of the slower variant. `variant` names the winner where a trial chose among several. `error` is the largest
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
    parts: dict[str, float] = {}
    facts: dict[str, bool] = {}
