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


class TimeOptimizer(Record, frozen=True, kw_only=True, tag="time-optimizer"):
    """The optimizer (by index in Evidence.optimizers) on clones of its parameters: as it is, foreach, and fused."""

    optimizer: int


class TimeModel(Record, frozen=True, kw_only=True, tag="time-model"):
    """One call of the captured root module (by index in Evidence.models) on captured inputs, against a variant.

    'without-graph': under no_grad. 'without-anomaly': anomaly detection off. 'deterministic-off': deterministic algorithms
    off. 'cropped': every tensor with `length` at dimension 1 cropped to `cropped_length`. 'batched': the batch repeated
    `factor` times; the result's `cured_s` is then the time of one original batch (divided by the factor). 'frozen':
    parameters in modules that no optimizer trains do not require gradients. `held` calls are made in a row and their outputs
    kept until the last, as a pass over several modules keeps its graph.
    """

    model: int
    variant: Literal["without-graph", "without-anomaly", "deterministic-off", "cropped", "batched", "frozen"]
    backward: bool
    length: int = 0
    cropped_length: int = 0
    factor: int = 1
    held: int = 1


class TimeDataset(Record, frozen=True, kw_only=True, tag="time-dataset"):
    """Fetch one batch of the loader (by index) in a copy of the process: items, collate, and indexing of ready tensors."""

    loader: int


class TimeWorkers(Record, frozen=True, kw_only=True, tag="time-workers"):
    """Run the loader (by index) for some batches with each of these numbers of worker processes.

    Between batches the model (by index in Evidence.models, -1: none) does its work on captured inputs, with a backward when
    `backward`; without a model, or on a device, the loop waits `work_s` instead.
    """

    loader: int
    counts: tuple[int, ...]
    model: int = -1
    backward: bool = True
    work_s: float = 0.0


Trial = (
    TimeInDtype
    | TimeAttention
    | TimeGrowingCat
    | TimeRecurrence
    | TimeNormalisation
    | TimeOptimizer
    | TimeModel
    | TimeDataset
    | TimeWorkers
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
