"""A smaller model: which units stay, and what that saved."""

from __future__ import annotations

from flatout.core.records.record import Record


class PruningPlan(Record, frozen=True, kw_only=True):
    """What of each parameter and buffer stays; enough to make the smaller model again from the larger one."""

    version: int = 1
    model: str
    """The name of the model's class."""
    shapes: dict[str, tuple[int, ...]]
    """Of the tensors that are cut, before."""
    remaining: dict[str, tuple[tuple[int, ...] | None, ...]]
    """Indexes that stay, by tensor and dimension; None where all stay."""
    attributes: dict[str, dict[str, int]] = {}
    """Numbers that modules hold beside their tensors: by path, by name."""
    dropped: tuple[str, ...] = ()
    """Paths of modules that are taken out of their Sequential or ModuleList."""
    states: tuple[tuple[tuple[int, ...] | None, ...], ...] = ()
    """Indexes of carried states that stay, by dimension."""


class PrunedGroup(Record, frozen=True, kw_only=True):
    """Units that are alike: each stands for a slice of every tensor in `places`."""

    name: str
    places: tuple[str, ...]
    """As "weight[0]": the dimension of a tensor."""
    num_units: int
    num_remaining: int
    num_parameters: int
    """That it alone takes away."""
    num_bytes: int


class PinnedUnits(Record, frozen=True, kw_only=True):
    """A dimension that could not be made smaller."""

    place: str
    size: int
    because: str


class DroppedBlock(Record, frozen=True, kw_only=True):
    """A block that was tried without, and what that did."""

    name: str
    effect: float
    """Relative change of the outputs, or rise of the loss where one was given."""
    is_dropped: bool


class PruningReport(Record, frozen=True, kw_only=True):
    """What pruning did to a model. FLOP are those of one call on the inputs that were given."""

    num_parameters_before: int
    num_parameters: int
    num_bytes_before: int
    """Of parameters and buffers."""
    num_bytes: int
    work_flop_before: int
    work_flop: int
    groups: tuple[PrunedGroup, ...] = ()
    pinned: tuple[PinnedUnits, ...] = ()
    blocks: tuple[DroppedBlock, ...] = ()
    error: float
    """Largest distance of an output to the masked original's in float64, over the largest number of that output."""

    @property
    def parameters_fraction(self) -> float:
        return self.num_parameters / max(1, self.num_parameters_before)


class SparseLayer(Record, frozen=True, kw_only=True):
    """A layer that was tried with a sparse weight, in rounds with the dense one."""

    name: str
    is_sparse: bool
    """False: refused, and left dense."""
    because: str
    density: float
    dense_s: float | None = None
    sparse_s: float | None = None
    ratio: tuple[float, float, float] | None = None
    """Sparse over dense, paired by round: median, low, high."""
