"""Evidence built by hand: a plausible training run of 100 ms a step, to which a test adds only what it is about.

    run = EvidenceBuilder()
    line = run.line("model.py", 12, "h = torch.tanh(self.cell(x[i], h))", loops=(10,))
    tanh = run.operator("aten.tanh", line, inputs=[(8, 64)], output=(8, 64), calls=50, op_s=0.001)
    first = run.call(tanh)
    run.call(tanh, first)
    evidence = run.build()

Methods return the index that other records refer to; a line that is there already keeps its index and the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final, Literal, TypeVar

from flatout.core.records.compilation import Compilation, CompileEvent
from flatout.core.records.distributed import Collective, Distributed, RankLine, RankSummary, Replication
from flatout.core.records.evidence import (
    Constant,
    Evidence,
    HostRead,
    LineTime,
    Loader,
    Model,
    Observing,
    Operator,
    OptimizerUse,
    Padding,
    Phase,
    RepeatedModule,
    StepKind,
    Steps,
    TensorSpec,
    Trace,
    UnusedGradient,
)
from flatout.core.records.finding import Finding, Rule
from flatout.core.records.hardware import Machine
from flatout.core.records.memory import FreshPages, PagesOfLine
from flatout.core.records.record import Record
from flatout.core.records.trial import Trial, TrialResult
from flatout.core.records.usage import CallUse, ModuleFact, RoundTrip
from flatout.core.records.workload import LibraryFrame, Setting, Source, Workload

MACHINE: Final = Machine(
    device_kind="cpu",
    device_name="cpu",
    cpu_model="Test CPU",
    num_cores=8,
    num_threads=8,
    torch_version="2.13.0",
    measured_at="2026-11-21T00:00:00+00:00",
    effort="full",
    matmul_flop_per_s={"float32": 200e9, "float64": 100e9},
    copy_bytes_per_s=20e9,
    dispatch_s=2e-6,
    dispatch_grad_s=6e-6,
    seconds=10.0,
)
PHASES: Final = {
    "data": 0.002,
    "transfer": 0.0,
    "forward": 0.040,
    "backward": 0.050,
    "optimizer": 0.005,
    "other": 0.003,
}
_ELEMENT_BYTES: Final = {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "bool": 1}

Shape = tuple[int, ...]
R = TypeVar("R", bound=Record)


def tensor(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape=shape, dtype=dtype)


def only_finding(rule: Rule, evidence: Evidence) -> Finding:
    """The one finding of `rule`, after a look at what every finding must keep."""
    [finding] = rule.check(evidence)
    low, high = finding.saved_s
    assert 0 <= low <= high
    assert high <= 1.2 * finding.cost_s, "a cure cannot save much more than the cause costs"
    assert 0 <= finding.cost_s <= evidence.steps.whole_s
    assert (finding.rule, finding.levers) == (rule.id, rule.levers)
    assert finding.because.isascii() and finding.edit.isascii() and finding.because and finding.edit
    assert all(0 <= i < len(evidence.operators) for i in finding.operators)
    return finding


def proposed(rule: Rule, evidence: Evidence) -> list[Trial]:
    """The trials that `rule` asks for."""
    assert rule.propose is not None
    return list(rule.propose(evidence))


class EvidenceBuilder:
    """Collects what was seen and builds Evidence of it. `phases` are seconds of a step that differ from the usual ones."""

    def __init__(
        self,
        *,
        kind: StepKind = "training",
        step_s: float = 0.1,
        noise_s: float = 0.001,
        evaluation_s: float = 0.0,
        restart_s: float = 0.0,
        device_s: float | None = None,
        machine: Machine | None = MACHINE,
        **phases: float,
    ) -> None:
        self.steps = Steps(
            kind=kind,
            num_observed=60,
            num_timed=50 if step_s else 0,
            step_s=step_s,
            low_s=step_s - noise_s,
            high_s=step_s + noise_s,
            evaluation_s=evaluation_s,
            restart_s=restart_s,
            device_s=device_s,
            phases=PHASES | phases,
        )
        self.machine = machine
        self.sources: list[Source] = []
        self.callers: dict[int, tuple[int, ...]] = {}
        self.backward_sources: list[int] = []
        self.operators: list[Operator] = []
        self.calls: list[tuple[int, tuple[int, ...]]] = []
        self.settings: list[Setting] = []
        self.lines: list[LineTime] = []
        self.round_trips: list[RoundTrip] = []
        self.host_reads: list[HostRead] = []
        self.constants: list[Constant] = []
        self.models: list[Model] = []
        self.optimizers: list[OptimizerUse] = []
        self.unused_gradients: list[UnusedGradient] = []
        self.loaders: list[Loader] = []
        self.paddings: list[Padding] = []
        self.recurrences: list[RepeatedModule] = []
        self.uses: list[CallUse] = []
        self.compilation: Compilation | None = None
        self.fresh_pages: FreshPages | None = None
        self.trials: list[TrialResult] = []
        self.facts: list[ModuleFact] = []
        self.escapes: tuple[int, ...] | None = None
        self.num_threads = 8
        self.collectives: list[Collective] = []
        self.replications: list[Replication] = []
        self.ranks: list[RankSummary] = []

    # ------------------------------------------------------------------------------------------------- lines and operators

    def line(
        self,
        file: str,
        line: int,
        text: str = "",
        *,
        function: str = "",
        loops: tuple[int, ...] = (),
        callers: tuple[int, ...] = (),
        via: tuple[LibraryFrame, ...] = (),
    ) -> int:
        """Index of this source line, with the lines of libraries below it, outermost first.

        `callers` are the lines that called its function, innermost first.
        """
        library = via[-1].place if via else ""
        source = Source(
            file=f"/home/ada/{file}", line=line, function=function, text=text, loops=loops, library=library, via=via
        )
        places = [(s.file, s.line, s.library) for s in self.sources]
        if (source.file, line, library) in places:
            return places.index((source.file, line, library))
        self.sources.append(source)
        index = len(self.sources) - 1
        if callers:
            self.callers[index] = callers
        return index

    def operator(
        self,
        op: str,
        source: int = -1,
        *,
        inputs: Sequence[Shape | TensorSpec] = (),
        output: Shape | TensorSpec = (8, 64),
        calls: float = 1.0,
        op_s: float = 0.001,
        python_s: float = 0.0,
        phase: Phase = "forward",
        module: str = "Net",
        flop: int = 0,
        scalars: str = "",
    ) -> int:
        """A row of equal calls; its index. Times are those of all `calls` of a step, `flop` is that of one call.

        On a device `op_s` is the device's time and `python_s` the host's; the step waits for the device or for the host.
        """
        tensors = [t if isinstance(t, TensorSpec) else tensor(*t) for t in (*inputs, output)]
        self.operators.append(
            Operator(
                op=op,
                source=source,
                module=module,
                phase=phase,
                inputs=tuple(tensors[:-1]),
                outputs=(tensors[-1],),
                num_calls=calls,
                op_s=op_s,
                python_s=python_s,
                flop=flop,
                bytes=sum(prod(t.shape) * _ELEMENT_BYTES[t.dtype] for t in tensors),
                scalars=scalars,
                bound=self._bound,
            )
        )
        return len(self.operators) - 1

    def call(self, row: int, *producers: int) -> int:
        """One call of this operator in the trace, made of what these earlier calls wrote; its index."""
        self.calls.append((row, producers))
        return len(self.calls) - 1

    def backward_at(self, source: int) -> None:
        """A backward pass was started at this line."""
        self.backward_sources.append(source)

    # ------------------------------------------------------------------------------------------------- what else was seen

    def model(
        self,
        source: int = -1,
        *,
        name: str = "Net",
        callers: tuple[int, ...] = (),
        calls: float = 1.0,
        call_s: float = 0.04,
        is_training: bool = True,
        graphs_built: int = 50,
        graphs_used: int = 50,
        batch_size: int = 32,
    ) -> int:
        return _add(
            self.models,
            Model(
                name=name,
                source=source,
                callers=callers,
                num_parameters=1_000_000,
                is_training=is_training,
                grad_enabled=graphs_built > 0,
                calls=calls,
                call_s=call_s,
                num_calls_observed=50,
                num_graphs_built=graphs_built,
                num_graphs_used=graphs_used,
                batch_size=batch_size,
            ),
        )

    def optimizer(
        self,
        source: int = -1,
        *,
        constructed: int = -1,
        name: str = "Adam",
        variant: Literal["for-loop", "foreach", "fused", "own"] = "for-loop",
        step_s: float = 0.005,
        calls: float = 1.0,
        num_tensors: int = 148,
        num_elements: int = 1_000_000,
        fused_supported: bool = True,
    ) -> int:
        return _add(
            self.optimizers,
            OptimizerUse(
                name=name,
                variant=variant,
                source=source,
                constructed=constructed,
                num_tensors=num_tensors,
                num_elements=num_elements,
                step_s=step_s,
                calls=calls,
                fused_supported=fused_supported,
            ),
        )

    def loader(
        self,
        source: int = -1,
        *,
        collate: int = -1,
        num_workers: int = 0,
        wait_s: float = 0.002,
        fetches: float = 1.0,
        is_map_style: bool = True,
        has_own_collate: bool = False,
        persistent_workers: bool = False,
        num_epochs: float = 0.0,
        first_wait_s: float = 0.0,
        is_in_ram: bool = False,
        constructed: int = -1,
        taken_from: int = -1,
    ) -> int:
        return _add(
            self.loaders,
            Loader(
                source=source,
                getitem=-1,
                collate=collate,
                dataset="Reviews",
                num_workers=num_workers,
                batch_size=32,
                wait_s=wait_s,
                fetches=fetches,
                is_map_style=is_map_style,
                has_own_collate=has_own_collate,
                persistent_workers=persistent_workers,
                num_epochs=num_epochs,
                first_wait_s=first_wait_s,
                is_in_ram=is_in_ram,
                sampler="RandomSampler",
                constructed=constructed,
                taken_from=taken_from,
            ),
        )

    def padding(
        self,
        source: int = -1,
        *,
        shape: Shape = (32, 200),
        padding_fraction: float = 0.6,
        longest_fraction: float = 0.75,
        signs: tuple[str, ...] = ("integers", "padding_idx"),
    ) -> int:
        return _add(
            self.paddings,
            Padding(
                name="tokens",
                source=source,
                shape=shape,
                dtype="int64",
                pad_value=0.0,
                padding_fraction=padding_fraction,
                longest_fraction=longest_fraction,
                num_batches=20,
                signs=signs,
                mean_length=(1 - padding_fraction) * shape[1],
                longest=longest_fraction * shape[1],
            ),
        )

    def unused_gradient(
        self,
        source: int,
        *,
        operators: tuple[int, ...] = (),
        seconds: float,
        module: str = "Net.body",
        is_whole: bool = False,
    ) -> int:
        return _add(
            self.unused_gradients,
            UnusedGradient(
                num_tensors=40,
                num_elements=3_000_000,
                modules=(module,),
                operators=operators,
                seconds=seconds,
                source=source,
                is_whole=is_whole,
            ),
        )

    def pages(self, source: int, *, faults: float, kernel_s: float) -> None:
        """Page faults a step, most of them at this line."""
        lines = (PagesOfLine(source=source, faults=0.9 * faults),)
        self.fresh_pages = FreshPages(faults=faults, kernel_s=kernel_s, num_steps=100, lines=lines)

    def recurrence(
        self, source: int, *, kind: Literal["GRUCell", "LSTMCell", "RNNCell"] = "GRUCell", calls: int
    ) -> int:
        return _add(
            self.recurrences,
            RepeatedModule(
                kind=kind,
                module="Net.cell",
                source=source,
                calls=calls,
                batch=16,
                input_size=32,
                hidden_size=64,
                operators=(),
            ),
        )

    def constant(self, source: int, *, seconds: float, operators: tuple[int, ...] = ()) -> int:
        return _add(
            self.constants,
            Constant(source=source, operators=operators, num_tensors=1, bytes=1 << 20, seconds=seconds),
        )

    def host_read(
        self,
        source: int,
        *,
        call: str = "item",
        calls: float = 1.0,
        wait_s: float = 0.0,
        on_device: bool = False,
    ) -> int:
        return _add(
            self.host_reads,
            HostRead(source=source, call=call, calls=calls, wait_s=wait_s, phase="other", on_device=on_device),
        )

    def sampled(
        self,
        source: int,
        seconds: float,
        *,
        num_samples: int = 50,
        phase: Phase = "forward",
        process: Literal["main", "worker"] = "main",
    ) -> int:
        """What the sampler found at this line."""
        return _add(
            self.lines,
            LineTime(source=source, phase=phase, seconds=seconds, num_samples=num_samples, process=process),
        )

    def upload(
        self,
        source: int,
        *,
        num_bytes: int,
        seconds: float,
        calls: float = 1.0,
        memory: Literal["pageable", "pinned"] = "pageable",
        mode: Literal["blocking", "async"] = "blocking",
    ) -> int:
        """Copies from this line to a device: `num_bytes` in each, `seconds` all of a step's together."""
        detail = f"host-to-device {memory} {mode}"
        return _add(
            self.uses,
            CallUse(name="Tensor.to", source=source, calls=calls, seconds=seconds, bytes=num_bytes, detail=detail),
        )

    def use(
        self,
        name: str,
        source: int,
        seconds: float,
        *,
        calls: float = 1.0,
        detail: str = "",
        num_bytes: int = 0,
        phase: Phase = "other",
    ) -> int:
        """A watched call at this line."""
        return _add(
            self.uses,
            CallUse(
                name=name, source=source, calls=calls, seconds=seconds, bytes=num_bytes, detail=detail, phase=phase
            ),
        )

    def compiled(
        self,
        *events: CompileEvent,
        compile_s: float = 5.0,
        num_frames: int = 1,
        at: tuple[int, ...] = (),
        before_limit_s: float | None = None,
    ) -> None:
        """torch.compile compiled in this run."""
        self.compilation = Compilation(
            compile_s=compile_s,
            num_frames=num_frames,
            num_graphs=num_frames,
            events=events,
            compiled_at=at,
            before_limit_s=before_limit_s,
        )

    def fact(
        self, name: str, source: int = -1, *, module: str = "Net", kind: str = "Net", value: float = 1.0, text: str = ""
    ) -> None:
        """A fact about a module or an optimizer."""
        self.facts.append(ModuleFact(name=name, module=module, kind=kind, value=value, text=text, source=source))

    def setting(self, name: str, value: str, source: int = -1) -> None:
        """A global switch in force, and the line that threw it."""
        self.settings.append(Setting(name=name, value=value, source=self.sources[source] if source >= 0 else None))

    # -------------------------------------------------------------------------------------------------------------- ranks

    def collective(
        self,
        source: int,
        *,
        op: str = "all_reduce",
        phase: str = "other",
        num: float = 1.0,
        bytes: int = 4,
        exposed_s: float = 0.01,
        wait_s: float = 0.0,
        caller: str = "",
        small_call_s: float = 0.0,
    ) -> int:
        """What a collective of two ranks takes in a step; the run becomes rank 0 of two."""
        return _add(
            self.collectives,
            Collective(
                op=op,
                source=source,
                phase=phase,
                backend="gloo",
                group_size=2,
                num=num,
                bytes=bytes,
                seconds=exposed_s,
                exposed_s=exposed_s,
                wait_s=wait_s,
                caller=caller,
                small_call_s=small_call_s,
            ),
        )

    def replication(
        self,
        source: int,
        *,
        backward: int = -1,
        bucket_bytes: tuple[int, ...] = (4 << 20,),
        syncs_per_step: float = 1.0,
        exposed_per_sync_s: float | None = 0.005,
        search_s: float = 0.0,
        find_unused_parameters: bool = False,
        has_unused_parameters: bool | None = False,
    ) -> int:
        return _add(
            self.replications,
            Replication(
                source=source,
                bucket_bytes=bucket_bytes,
                find_unused_parameters=find_unused_parameters,
                has_unused_parameters=has_unused_parameters,
                static_graph=False,
                gradient_as_bucket_view=False,
                syncs_per_step=syncs_per_step,
                backward_source=backward,
                exposed_per_sync_s=exposed_per_sync_s,
                search_s=search_s,
                bucket_cap_bytes=25 << 20,
            ),
        )

    def rank(
        self, *, work_s: Sequence[float], elements: Sequence[int], lines: tuple[RankLine, ...] = (), host: str = "host"
    ) -> int:
        """The next rank's own work and batches, step by step."""
        number = len(self.ranks)
        return _add(
            self.ranks,
            RankSummary(
                rank=number,
                host=host,
                step_s=self.steps.step_s,
                work_s=sum(work_s) / len(work_s),
                step_numbers=tuple(range(4, 4 + len(work_s))),
                work_by_step=tuple(work_s),
                batch_elements=tuple(elements),
                lines=lines,
            ),
        )

    def _distributed(self) -> Distributed | None:
        if not (self.collectives or self.replications or self.ranks):
            return None
        return Distributed(
            backend="gloo",
            rank=0,
            world_size=max(2, len(self.ranks)),
            ranks=tuple(self.ranks),
            collectives=tuple(self.collectives),
            replications=tuple(self.replications),
        )

    # ------------------------------------------------------------------------------------------------------------- trials

    def trial(self, result: TrialResult) -> None:
        self.trials.append(result)

    def tried(self, *trials: Trial, kept: float, now_s: float = 0.01, variant: str = "", **facts: bool) -> None:
        """These trials ran, and the cure left the fraction `kept` of the time."""
        for trial in trials:
            self.trial(TrialResult(trial=trial, now_s=now_s, cured_s=kept * now_s, variant=variant, facts=facts))

    def refused(self, *trials: Trial, why: str) -> None:
        """These trials could not be run."""
        for trial in trials:
            self.trial(TrialResult(trial=trial, refused=why))

    # -------------------------------------------------------------------------------------------------------------- build

    def build(self) -> Evidence:
        return Evidence(
            workload=Workload(
                command=("train.py",),
                cwd="/home/ada",
                python="3.11.7",
                torch="2.13.0",
                device="cpu" if self.steps.device_s is None else "NVIDIA H200",
                num_cores=8,
                num_threads=self.num_threads,
                settings=tuple(self.settings),
            ),
            machine=self.machine,
            steps=self.steps,
            sources=tuple(self.sources),
            callers=dict(self.callers),
            backward_sources=tuple(self.backward_sources),
            operators=tuple(self.operators),
            trace=self._trace(),
            lines=tuple(self.lines),
            host_reads=tuple(self.host_reads),
            constants=tuple(self.constants),
            models=tuple(self.models),
            optimizers=tuple(self.optimizers),
            unused_gradients=tuple(self.unused_gradients),
            loaders=tuple(self.loaders),
            paddings=tuple(self.paddings),
            recurrences=tuple(self.recurrences),
            uses=tuple(self.uses),
            round_trips=tuple(self.round_trips),
            compilation=self.compilation,
            fresh_pages=self.fresh_pages,
            module_facts=tuple(self.facts),
            distributed=self._distributed(),
            trials=tuple(self.trials),
            observing=Observing(light_fraction=0.01, deep_s=0.4, trials_s=1.0, other_s=0.2, num_deep_steps=3),
            exit="finished",
            exit_code=0,
        )

    @property
    def _bound(self) -> Literal["sum", "device", "host"]:
        if self.steps.device_s is None:
            return "sum"
        return "device" if self.steps.is_device_bound else "host"

    def _trace(self) -> Trace:
        return Trace(
            operator=tuple(row for row, _ in self.calls),
            producers=tuple(producers for _, producers in self.calls),
            escapes=self.escapes,
        )


def _add(records: list[R], record: R) -> int:
    records.append(record)
    return len(records) - 1
