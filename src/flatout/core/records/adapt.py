"""Fewer trained parameters: the ways to do it, what each one trains, and what it was predicted and seen to cost."""

from __future__ import annotations

from flatout.core.records.record import Record


class Lora(Record, frozen=True, kw_only=True, tag=True):
    """A product of two small matrices added to each target's weight: `alpha / rank * B @ A` (Hu et al., arXiv 2106.09685)."""

    rank: int | None = 8
    """None: the largest power of two up to 64 whose pairs fit into `budget`."""
    targets: tuple[str, ...] | None = None
    """Patterns of module paths; None: chosen, see flatout.shrink.adapt.targets."""
    alpha: float | None = None
    """None: the rank, so that the product is added as it is."""
    is_dora: bool = False
    """Also a learned length of each row of the weight (Liu et al., arXiv 2402.09353)."""
    dropout: float = 0.0
    """Of the input of A, in training; for linear layers and convolutions."""
    budget: int | None = None
    """The most parameters to train."""


class Bottleneck(Record, frozen=True, kw_only=True, tag=True):
    """`y + up(relu(down(y)))` behind each named module (Houlsby et al., arXiv 1902.00751); starts as y."""

    width: int = 16
    after: tuple[str, ...] | None = None
    """Patterns of module paths; None: each Linear, convolution, recurrent layer and attention but the last one."""


class Prompt(Record, frozen=True, kw_only=True, tag=True):
    """Learned vectors in front of [B, T, C] (Lester et al., arXiv 2104.08691)."""

    num_vectors: int = 8
    after: str | None = None
    """In front of this module's output."""
    before: str | None = None
    """Or in front of this module's first input."""
    cut: str | None = None
    """Of the outputs of this module those of the vectors are cut off ("": the model); None: the one in `before`, or the model."""
    is_cut: bool = True


class Prefix(Record, frozen=True, kw_only=True, tag=True):
    """Learned vectors from which attention makes further keys and values (after Li and Liang, arXiv 2101.00190)."""

    num_vectors: int = 8
    targets: tuple[str, ...] | None = None
    """Patterns of paths of nn.MultiheadAttention; None: all of them."""


class BitFit(Record, frozen=True, kw_only=True, tag=True):
    """Only biases, norms included (Ben Zaken et al., arXiv 2106.10199), and what `also` names."""

    also: tuple[str, ...] = ()


class Freeze(Record, frozen=True, kw_only=True, tag=True):
    """Only the parameters that are kept. One of the three is given."""

    keep: tuple[str, ...] = ()
    """Patterns of paths of modules or parameters."""
    last: int | None = None
    """The last modules that have parameters of their own, in the order in which the model names them."""
    budget: int | None = None
    """As many of the last modules as have at most this many parameters together."""


Method = Lora | Bottleneck | Prompt | Prefix | BitFit | Freeze


class Trained(Record, frozen=True, kw_only=True):
    """What an adapter trains, of how much."""

    method: Method
    parameters: int
    """Numbers that are trained."""
    of_parameters: int
    """That the plain model has."""
    hosts: tuple[str, ...]
    """Where it is: paths of modules ("path/weight" for a low-rank pair), or of parameters of the model's own."""
    rank: int | None = None
    """Of low-rank pairs, as given or chosen."""
    why: dict[str, str] = {}
    """Why a module is a target, or is none, by its path."""

    @property
    def fraction(self) -> float:
        return self.parameters / self.of_parameters if self.of_parameters else 0.0


class Merged(Record, frozen=True, kw_only=True):
    """What merging an adapter into the weights cost in rounding."""

    weight_error: float
    """Largest distance of a merged weight from its sum in float64, over the weight's largest number."""
    adapted_error: float | None = None
    """Of the adapted model's outputs from those of the same model in float64, over their largest number."""
    merged_error: float | None = None
    """The same of the merged model."""


class StepCost(Record, frozen=True, kw_only=True):
    """What one training step takes: parameters, bytes and seconds."""

    trained_parameters: int
    gradient_bytes: int
    state_bytes: int
    """Of the optimizer."""
    saved_bytes: int
    """What forward keeps for backward, weights and inputs left out."""
    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def training_bytes(self) -> int:
        """Gradients, the optimizer's state, and what forward keeps."""
        return self.gradient_bytes + self.state_bytes + self.saved_bytes


class Prediction(Record, frozen=True, kw_only=True):
    """What a training step of the adapted model takes beside the plain model's, measured on copies before anything is changed."""

    method: Method
    plain: StepCost
    adapted: StepCost
    step_ratio: float
    """Adapted over plain."""
    step_ratio_low: float
    step_ratio_high: float
    num_rounds: int
