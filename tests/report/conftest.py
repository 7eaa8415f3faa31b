"""A small run, built by hand, and golden text: `pytest tests/reporting --accept` rewrites it; then read the diff."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console, RenderableType

from flatout.core.records.evidence import Evidence, Observing, Steps
from flatout.core.records.finding import Diagnosis, HotLine, Note, PartLine, PartOfStep, RankedFinding
from flatout.core.records.hardware import Machine
from flatout.core.records.workload import Source, Workload
from flatout.report.document import Block
from flatout.report.text import terminal_report

GOLDEN = Path(__file__).parent.parent / "golden" / "reporting"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write golden text instead of comparing with it")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare text with the golden file of that name."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--accept", default=False):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden file {path.name}: pytest tests/reporting --accept, and read it"
        assert text == path.read_text(encoding="utf-8"), "if the change is meant: pytest tests/reporting --accept"

    return compare


def _rendered(
    renderable: RenderableType | list[Block], *, width: int = 100, limit: int = 100, encoding: str = "utf-8"
) -> str:
    shown = io.BytesIO()
    file = io.TextIOWrapper(shown, encoding=encoding, newline="")
    console = Console(file=file, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(terminal_report(renderable, width=limit) if isinstance(renderable, list) else renderable)
    file.flush()
    text = shown.getvalue().decode(encoding)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@pytest.fixture
def render() -> Callable[..., str]:
    """What a console of that width and encoding shows of a report, without colour and without blanks at the ends of lines."""
    return _rendered


ATTENTION = Source(
    file="/home/ada/gpt/model.py",
    line=48,
    function="Attention.forward",
    text="weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)) + mask, dim=-1)",
)
MASK = Source(file="/home/ada/gpt/model.py", line=46, text="mask = torch.full((t, t), -torch.inf).triu(1)")
BATCH = Source(file="/home/ada/gpt/train.py", line=31, text="x = torch.stack([self.encode(row) for row in rows])")
STEP = Source(file="/home/ada/gpt/train.py", line=77, text="optimizer.step()")
HEAD = Source(file="/opt/shared/team/language/models/heads/language_model_head.py", line=120, text="self.head(x)")


@pytest.fixture
def machine() -> Machine:
    return Machine(
        device_kind="cpu",
        device_name="cpu",
        cpu_model="Intel Xeon Platinum 8481C",
        num_cores=2,
        num_threads=2,
        torch_version="2.13.0",
        measured_at="2026-11-20T12:00:00Z",
        effort="quick",
        matmul_flop_per_s={"float32": 190e9},
        copy_bytes_per_s=14e9,
        dispatch_s=2e-6,
        dispatch_grad_s=6e-6,
        seconds=1.4,
    )


@pytest.fixture
def evidence(machine: Machine) -> Evidence:
    phases = {
        "data": 0.0091,
        "forward": 0.0102,
        "backward": 0.0145,
        "optimizer": 0.0032,
        "evaluation": 0.0,
        "other": 0.0012,
    }
    return Evidence(
        workload=Workload(
            command=("train.py",),
            cwd="/home/ada/gpt",
            python="3.11.7",
            torch="2.13.0",
            device="cpu",
            num_cores=2,
            num_threads=2,
        ),
        machine=machine,
        steps=Steps(
            kind="training", num_observed=231, num_timed=212, step_s=0.0382, low_s=0.0379, high_s=0.0386, phases=phases
        ),
        sources=(ATTENTION, MASK, BATCH, STEP, HEAD),
        observing=Observing(
            light_fraction=0.008, deep_s=0.41, trials_s=2.73, other_s=0.2, num_deep_steps=3, deep_agreement=0.94
        ),
        exit="finished",
        exit_code=0,
        notes=("the 4 workers of the DataLoader: no sampler runs in them",),
    )


@pytest.fixture
def finding() -> RankedFinding:
    return RankedFinding(
        rule="bandwidth.written-out-attention",
        title="Attention is written out by hand",
        file=ATTENTION.file,
        line=ATTENTION.line,
        regime="bandwidth",
        cost_s=0.0124,
        share=0.325,
        gain=(1.28, 1.44),
        because="The 256 x 256 scores of 8 heads are written and read five times (33.6 MiB); the fused product keeps "
        "them in the cache. The trial took 3.10 ms instead of 13.9 ms for forward and backward.",
        edit="F.scaled_dot_product_attention(q, k, v, is_causal=True) in place of lines 46 to 50",
        text=ATTENTION.text,
        also=(MASK,),
        module="blocks.0.attention",
        levers=("memory.fused-attention",),
        basis="trial",
        merged=("overhead.constant-rebuilt",),
    )


PARTS = (
    PartOfStep(
        kind="kernels",
        name="matrix products",
        seconds=0.0132,
        floor_s=0.0061,
        num_calls=73,
        lines=(PartLine(source=ATTENTION, seconds=0.0071), PartLine(source=HEAD, seconds=0.0052)),
        basis="operators",
    ),
    PartOfStep(
        kind="data",
        name="waiting for data",
        seconds=0.0091,
        lines=(PartLine(source=BATCH, seconds=0.0089),),
        basis="time stamps",
    ),
    PartOfStep(
        kind="python",
        name="Python at train.py:77",
        seconds=0.0041,
        lines=(PartLine(source=STEP, seconds=0.0041),),
        basis="samples",
    ),
    PartOfStep(
        kind="dispatch",
        name="autograd engine",
        seconds=0.0032,
        num_calls=418.4,
        basis="probe",
    ),
    PartOfStep(kind="kernels", name="sorting", seconds=0.0018, floor_s=0.0, num_calls=1, basis="operators"),
    PartOfStep(kind="package", name="tokenizers", seconds=0.0002, basis="samples"),
    PartOfStep(kind="memory", name="page faults of new memory", seconds=0.0001, basis="the kernel"),
)
"""They leave 6.5 ms of the step."""


@pytest.fixture
def diagnosis(finding: RankedFinding) -> Diagnosis:
    batch = msgspec.structs.replace(
        finding,
        rule="input.slow-dataset",
        title="The loop waits for batches that are encoded row by row",
        file=BATCH.file,
        line=BATCH.line,
        regime="input",
        cost_s=0.0091,
        share=0.238,
        gain=(1.2, 1.31),
        because="64 calls of encode() make one batch in 8.90 ms; indexing a tensor encoded once takes 0.04 ms.",
        edit="encode all rows once in __init__:\n    self.rows = torch.stack([encode(row) for row in rows])\n"
        "then __getitem__ is self.rows[index]",
        text=BATCH.text,
        also=(),
        module="",
        merged=(),
    )
    step = msgspec.structs.replace(
        batch,
        rule="overhead.loop-optimizer",
        title="The optimizer walks over the parameters one by one",
        file=STEP.file,
        line=STEP.line,
        regime="overhead",
        cost_s=0.0021,
        share=0.055,
        gain=(1.03, 1.06),
        because="148 tensors, 12 operators each.",
        edit="torch.optim.AdamW(..., fused=True)",
        text=STEP.text,
        basis="estimate",
    )

    return Diagnosis(
        step_s=0.0382,
        floor_s=0.0081,
        explained_s=0.0236,
        unexplained_s=0.0065,
        findings=(finding, batch, step),
        notes=(
            Note(
                rule="overhead.host-read",
                where=STEP,
                text="loss.item() is read every step; on a CPU it waits for nothing.",
            ),
        ),
        hot_lines=(
            HotLine(
                source=ATTENTION,
                seconds=0.0124,
                python_s=0.0003,
                flop=1_610_000_000,
                bytes=35_200_000,
                floor_s=0.0025,
                regime="bandwidth",
            ),
            HotLine(
                source=HEAD,
                seconds=0.0061,
                python_s=0.00002,
                flop=806_000_000,
                bytes=3_100_000,
                floor_s=0.0042,
                regime="compute",
            ),
            HotLine(
                source=STEP, seconds=0.0032, python_s=0.0021, flop=0, bytes=9_800_000, floor_s=0.0007, regime="overhead"
            ),
        ),
        checked=(
            "capacity.tiny-batch",
            "compute.float64",
            "compute.anomaly-detection",
            "input.padding",
            "overhead.growing-cat",
            "overhead.host-read",
            "run.graph-without-backward",
        ),
        parts=PARTS,
        refused=("batch of twice the size: the captured inputs have no batch dimension in common",),
    )
