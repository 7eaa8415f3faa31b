"""What was observed while a script ran: raw facts, aggregated; no judgement.

All times are seconds for one step unless a name says otherwise. A step is what lies between two optimizer steps of a
training loop, between two forward passes of an inference loop, or one call of a step function.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Literal

from flatout.core.records.compilation import Compilation, CompileEvent
from flatout.core.records.device import DeviceStep
from flatout.core.records.distributed import Collective, Distributed
from flatout.core.records.hardware import Machine
from flatout.core.records.load import MachineLoad
from flatout.core.records.memory import FreshPages, Memory
from flatout.core.records.record import Record
from flatout.core.records.span import StepTimeline
from flatout.core.records.trial import TrialResult
from flatout.core.records.usage import CallUse, ModuleFact, RoundTrip
from flatout.core.records.workload import Source, Workload

SCHEMA_VERSION = 2

StepKind = Literal["training", "inference", "call", "none"]
Phase = Literal[
    "data",
    "transfer",
    "environment",
    "rollout",
    "no_grad",
    "forward",
    "backward",
    "optimizer",
    "evaluation",
    "compile",
    "other",
]


class Steps(Record, frozen=True, kw_only=True):
    """The honest timing: light observation only, warm-up left out.

    `step_s` is the median of the ordinary steps, `low_s`..`high_s` its 95 % interval, `evaluation_s` what evaluation passes
    between the steps add to each of them on average, `restart_s` what starting loaders over (epochs) adds, and `occasional_s`
    what is done in few of them: files saved, graphs compiled. `device_s` is the device's busy time in a step, None on a CPU.
    """

    kind: StepKind
    num_observed: int
    num_timed: int
    step_s: float
    low_s: float
    high_s: float
    evaluation_s: float = 0.0
    occasional_s: float = 0.0
    restart_s: float = 0.0
    device_s: float | None = None
    durations_s: tuple[float, ...] = ()
    phases: dict[str, float] = {}
    phase_intervals: dict[str, tuple[float, float]] = {}
    """95 % interval of a phase's seconds, where enough steps were watched."""

    @property
    def whole_s(self) -> float:
        """A step and its share of what comes between steps or in few of them: evaluation, epochs that start, files saved."""
        return self.step_s + self.evaluation_s + self.restart_s + self.occasional_s

    @property
    def phases_of_whole(self) -> dict[str, float]:
        """Seconds of each phase, together no more than `whole_s`."""
        total_s = sum(self.phases.values())
        factor = min(1.0, self.whole_s / total_s) if total_s > 0 else 1.0
        return {name: seconds * factor for name, seconds in self.phases.items()}

    @property
    def is_device_bound(self) -> bool:
        """Whether the device is busy nearly all of the step, so that saving host time gains nothing."""
        return self.device_s is not None and self.device_s >= 0.9 * self.step_s

    @property
    def noise_s(self) -> float:
        """Half the interval of the median: what a change must exceed to be measurable."""
        return (self.high_s - self.low_s) / 2


class TensorSpec(Record, frozen=True, kw_only=True):
    """Shape, dtype ('float32') and layout of a tensor an operator read or wrote."""

    shape: tuple[int, ...]
    dtype: str
    is_contiguous: bool = True

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class Operator(Record, frozen=True, kw_only=True):
    """All calls of one operator from one line, in one module, on one set of shapes, in a step.

    `op` is the aten name without overload ('aten.bmm'); `source` is an index into Evidence.sources, -1 when no user line was
    on the stack (for a backward operator, the line of its forward operator). `num_calls` and the times are per step;
    `flop` and `bytes` are per call. On a CPU `op_s` is the operator and `python_s` the host's time between the previous operator
    and this one; they follow one another (`bound` 'sum'). On a device `op_s` is the device's time and `python_s` the host's, its
    dispatch included; they run beside one another, and `bound` is the one that the step waits for.
    """

    op: str
    source: int
    module: str
    phase: Phase
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    num_calls: float
    op_s: float
    python_s: float
    flop: int
    bytes: int
    scalars: str = ""
    bound: Literal["sum", "device", "host"] = "sum"

    @property
    def total_s(self) -> float:
        """Seconds of the step that these calls account for."""
        if self.bound == "sum":
            return self.op_s + self.python_s
        return self.op_s if self.bound == "device" else self.python_s


class Trace(Record, frozen=True, kw_only=True):
    """One deep step in order, as columns: which Operator ran, and which earlier calls produced its inputs.

    `producers[i]` holds indices into the trace, one for each input tensor of call i; -1 is a tensor created before the step.
    `escapes` are the calls whose results the step's operators need not read to be of use: they write into memory from before
    the step, stay alive from step to step, or reach Python without an operator (numpy, tolist, pickling). None: not watched.
    """

    operator: tuple[int, ...] = ()
    producers: tuple[tuple[int, ...], ...] = ()
    truncated: bool = False
    escapes: tuple[int, ...] | None = None


class LineTime(Record, frozen=True, kw_only=True):
    """Share of a step's time that a sampler found at this line (its callees in libraries included).

    `process` is 'main' or 'worker'; a worker's seconds are those spent for one step in all workers together.
    """

    source: int
    phase: Phase
    seconds: float
    num_samples: int
    in_python_s: float = 0.0
    process: Literal["main", "worker"] = "main"


class HostRead(Record, frozen=True, kw_only=True):
    """A line that makes the host read a tensor's values: it waits for the device if the tensor is on one."""

    source: int
    call: str
    calls: float
    wait_s: float
    phase: Phase
    on_device: bool


class Constant(Record, frozen=True, kw_only=True):
    """Tensors computed from nothing but constants at this line, equal bit for bit in two steps.

    `seconds` is the time of the operators and of the Python between them; `operators` their indices.
    """

    source: int
    operators: tuple[int, ...]
    num_tensors: int
    bytes: int
    seconds: float


class Model(Record, frozen=True, kw_only=True):
    """A module called from outside any other module, from one line, by one chain of callers (innermost first)."""

    name: str
    source: int
    callers: tuple[int, ...]
    num_parameters: int
    is_training: bool
    grad_enabled: bool
    calls: float
    call_s: float
    num_calls_observed: int
    num_graphs_built: int
    num_graphs_used: int
    num_compared_calls: int = 0
    """Calls whose input was compared with that of the call before."""
    num_prefix_calls: int = 0
    """Those of them that were the input of the call before with more positions behind it (dimension 1)."""
    captured_length: int = 0
    """Positions (dimension 1) of the first input that trials run on; 0 when it has no such dimension."""
    batch_size: int = 0
    """Rows of its first input tensor; 0 where its inputs were not captured."""


class OptimizerUse(Record, frozen=True, kw_only=True):
    """An optimizer that stepped. `variant` is how it walks over the parameters, `calls` how often it steps in a step of the loop,
    and `step_s` how long one call takes.
    """

    name: str
    variant: Literal["for-loop", "foreach", "fused", "own"]
    source: int
    constructed: int
    num_tensors: int
    num_elements: int
    step_s: float
    fused_supported: bool
    calls: float = 1.0


class UnusedGradient(Record, frozen=True, kw_only=True):
    """Parameters of one root module that received a gradient but belong to no optimizer that steps.

    `is_whole`: no parameter of that root module is trained, a teacher's for example.
    """

    num_tensors: int
    num_elements: int
    modules: tuple[str, ...]
    operators: tuple[int, ...]
    seconds: float
    source: int
    is_whole: bool = False


class Loader(Record, frozen=True, kw_only=True):
    """A torch DataLoader that fed the steps."""

    source: int
    getitem: int
    collate: int
    dataset: str
    num_workers: int
    batch_size: int
    wait_s: float
    fetches: float
    is_map_style: bool
    has_own_collate: bool
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int = 0
    num_epochs: float = 0.0
    """Iterators created after the first, for each observed step: how often worker processes start anew."""
    first_wait_s: float = 0.0
    """Mean wait for the first batch of an iterator, making and ending the iterator included: what an epoch costs besides."""
    is_in_ram: bool = False
    """Whether the data set's items are rows of tensors that lie in memory (TensorDataset and the like)."""
    sampler: str = ""
    constructed: int = -1
    """The line that constructed the loader, -1 where that was not observed."""
    taken_from: int = -1
    """The line that constructed the first loader over its data set, where this one took that over, as those of Accelerate and
    Opacus do; else -1."""


class Padding(Record, frozen=True, kw_only=True):
    """Padding found in one tensor of the batches: trailing constants along dimension 1.

    `padding_fraction` is the mean share of padded positions; `longest_fraction` the mean of the longest row over the width;
    `signs` are the reasons to take it for padding ('padding_idx', 'mask', 'lengths', 'integers').
    """

    name: str
    source: int
    shape: tuple[int, ...]
    dtype: str
    pad_value: float
    padding_fraction: float
    longest_fraction: float
    num_batches: int
    signs: tuple[str, ...]
    mean_length: float
    longest: float


class RepeatedModule(Record, frozen=True, kw_only=True):
    """A module called many times in one step, each time on the output of the time before (a recurrence)."""

    kind: Literal["GRUCell", "LSTMCell", "RNNCell"]
    module: str
    source: int
    calls: int
    batch: int
    input_size: int
    hidden_size: int
    operators: tuple[int, ...]


class Observing(Record, frozen=True, kw_only=True):
    """What the observation itself cost."""

    light_fraction: float
    deep_s: float
    trials_s: float
    other_s: float
    num_deep_steps: int
    trials_budget_s: float = 0.0
    """What trials might have taken; 0 where it is not known."""
    deep_agreement: float | None = None
    """Time accounted for in the deep steps over the light step's time, before scaling; None without deep steps."""
    nearby_step_s: float | None = None
    """The light steps next to the deep ones: what the operators' times add up to."""


class Evidence(Record, frozen=True, kw_only=True):
    """All that was observed in one run. `notes` name what could not be observed, and why."""

    schema_version: int = SCHEMA_VERSION
    workload: Workload
    machine: Machine | None
    steps: Steps
    sources: tuple[Source, ...] = ()
    callers: dict[int, tuple[int, ...]] = {}
    """For a source line that ran operators: the user's lines that called its function, innermost first."""
    backward_sources: tuple[int, ...] = ()
    float64_sources: tuple[int, ...] = ()
    """Lines outside the steps that brought float64 arrays in from NumPy which a step reads."""
    operators: tuple[Operator, ...] = ()
    kernel_operators: tuple[Operator, ...] = ()
    """Of compiled code on a device: the operators and compiled kernels of one profiled step, with the device's seconds of each
    (`op_s`). The profiler knows no lines. Of the same time, `operators` has at most one row for each compiled graph."""
    trace: Trace = Trace()
    lines: tuple[LineTime, ...] = ()
    host_reads: tuple[HostRead, ...] = ()
    constants: tuple[Constant, ...] = ()
    models: tuple[Model, ...] = ()
    optimizers: tuple[OptimizerUse, ...] = ()
    unused_gradients: tuple[UnusedGradient, ...] = ()
    loaders: tuple[Loader, ...] = ()
    paddings: tuple[Padding, ...] = ()
    recurrences: tuple[RepeatedModule, ...] = ()
    memory: tuple[Memory, ...] = ()
    """One for the host and one for each device that was used."""
    fresh_pages: FreshPages | None = None
    compilation: Compilation | None = None
    device_step: DeviceStep | None = None
    distributed: Distributed | None = None
    timeline: StepTimeline | None = None
    uses: tuple[CallUse, ...] = ()
    module_facts: tuple[ModuleFact, ...] = ()
    round_trips: tuple[RoundTrip, ...] = ()
    trials: tuple[TrialResult, ...] = ()
    observing: Observing
    load: MachineLoad | None = None
    """What other processes took of the machine meanwhile; None where it was not read."""
    exit: str = ""
    """How the script ended: '' while it went on, 'finished', 'stopped', or the exception's last line."""
    exit_code: int | None = None
    notes: tuple[str, ...] = ()

    def source_of(self, index: int) -> Source | None:
        """The source line with this index; None for -1."""
        return self.sources[index] if 0 <= index < len(self.sources) else None

    def function_of(self, index: int) -> tuple[str, str]:
        """File and function of the source line with this index; empty for -1."""
        source = self.source_of(index)
        return (source.file, source.function) if source is not None else ("", "")

    def sources_of(self, indices: Iterable[int]) -> tuple[Source, ...]:
        """The source lines with these indices, in their order."""
        return tuple(line for index in indices if (line := self.source_of(index)) is not None)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of a step, none where the process is no rank of several."""
        return self.distributed.collectives if self.distributed is not None else ()

    def compile_events(self, kind: str) -> list[CompileEvent]:
        """What torch.compile did of this kind, by line."""
        return [e for e in self.compilation.events if e.kind == kind] if self.compilation is not None else []
