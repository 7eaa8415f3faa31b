"""A line spends its time in Python, not in tensor operators.

Costs        The host's time; on a GPU it is hidden only while the device has work queued.
Evidence     A sampler finds the step at this line far longer than the line's operators run: NumPy round trips, parsing, copying
             of state, logging.
Levers       graph.vectorise, graph.hoist-constant, graph.compile-loop, memory.gather-once, communication.tensors-once
False alarm  The lines that wait on purpose (the loader, the backward call); sampling noise; lines that only call modules and
             torch's operators, whose Python is torch's own dispatch (overhead.tiny-operators tells it).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, LineTime
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import group_by
from flatout.machine.cost.lines import Line, line_finder, source_of_line

_FEWEST_SAMPLES = 8
_PHASES = ("forward", "other")
_STEPS: Final = re.compile(r"\.(backward|step)\(")
"""The backward, an optimizer, an environment: late samples of them, and what nobody moves out of the loop."""
_CALLED: Final = re.compile(r"([A-Za-z_][\w.]*|\.\w+)\s*\(")
"""What the text of a line calls: 'self.fc3', 'torch.sum', '.relu'."""
_TORCH: Final = ("torch", "F", "nn")
_FROM_PYTHON: Final = frozenset(
    ("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "Tensor", "save", "load", "compile", "no_grad")
)
"""Functions of torch that work through Python's objects or files, or take a Python function."""
_METHODS: Final = frozenset(
    (
        "to",
        "type",
        "float",
        "double",
        "half",
        "long",
        "flatten",
        "reshape",
        "matmul",
        "contiguous",
        "size",
        "dim",
        "chunk",
    )
)
"""Methods of tensors that run operators of other names, or none."""
_HIDDEN_CALLS: Final = ("for ", "while ", "yield ", "import ", "from ", "def ", "class ")
"""How lines begin that run Python which their text does not show."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that a sampler found busy without operators."""
    if evidence.steps.is_device_bound:
        return
    skip = {r.source for r in evidence.host_reads if r.on_device}  # there the host waits; overhead.host-read judges it
    skip |= (
        set(evidence.backward_sources) | {o.source for o in evidence.optimizers} | {u.source for u in evidence.loaders}
    )
    skip |= {c.source for c in evidence.collectives}  # waiting for other ranks is not Python
    line_of = line_finder(evidence)
    skipped = {line_of(s) for s in skip}
    rows = [r for r in evidence.lines if r.process == "main" and r.phase in _PHASES and r.source >= 0]
    scale = _growth(evidence)
    in_operators: dict[Line | None, float] = defaultdict(float)
    for operator in evidence.operators:
        if operator.phase not in ("backward", "optimizer"):
            in_operators[line_of(operator.source)] += scale * operator.op_s
    for line, sampled in group_by(rows, lambda r: line_of(r.source)).items():
        total_s, num = sum(r.seconds for r in sampled), sum(r.num_samples for r in sampled)
        python_s = total_s - in_operators[line]
        if line is None or line in skipped or num < _FEWEST_SAMPLES or python_s <= 0.5 * total_s:
            continue
        if any(_STEPS.search(text) for text in _texts(evidence, sampled)):
            continue
        if not line.library and _only_runs_torch(evidence, line, sampled):
            continue
        package = "" if line.library else _library(evidence, sampled)
        yield Finding(
            where=source_of_line(evidence, sampled[0].source, line),
            cost_s=python_s,
            saved_s=(0.5 * python_s, 0.95 * python_s),
            because=f"{num} samples put {total_s * 1e3:.2f} ms of a step on this line{package}, its tensor "
            f"operators take {in_operators[line] * 1e3:.2f} ms",
            edit=_edit(package),
            operators=tuple(
                i
                for i, o in enumerate(evidence.operators)
                if line_of(o.source) == line and o.phase not in ("backward", "optimizer")
            ),
        )


def _texts(evidence: Evidence, sampled: list[LineTime]) -> tuple[str, ...]:
    """The user's line, and the innermost one of a package that ran below it."""
    source = evidence.sources[sampled[0].source]
    return (source.text, *(frame.text for frame in source.via[-1:]))


def _edit(package: str) -> str:
    """What can be done about Python on a line; of a package's, in `package`'s half sentence, only its calls can be fewer."""
    if package:
        return "call it less often, or for more data at once; or put another class or function in its place"
    return "do it once before the loop, less often, or with tensor operators on all the data at once"


def _only_runs_torch(evidence: Evidence, line: Line, sampled: list[LineTime]) -> bool:
    """Whether all that a line calls are modules and torch's operators: there is no Python on it to move.

    A sample inside torch is filed under the user's line without a trace of torch, like one in the line's own Python. So the
    line's text is held against the operators and modules that ran there. Most samples in another package speak for Python.
    """
    here = [i for i, s in enumerate(evidence.sources) if (s.file, s.line) == (line.file, line.line)]
    operators = [o for o in evidence.operators if o.source in here and o.phase != "backward"]
    text = evidence.sources[sampled[0].source].text.partition("#")[0].strip()
    calls_model = any(m.source in here for m in evidence.models)
    if not (operators or calls_model) or not text or text.startswith(_HIDDEN_CALLS) or _library(evidence, sampled):
        return False
    known = {o.op.rpartition(".")[2].strip("_") for o in operators}
    known |= {part for o in operators for part in o.module.split(".")[1:]}
    unknown = [name for name in _CALLED.findall(text) if not _is_of_torch(name, known)]
    return len(unknown) <= calls_model


def _is_of_torch(name: str, known: set[str]) -> bool:
    """Whether a called name is a function of torch's, or an operator or a module that ran on the line."""
    owner, _, last = name.rpartition(".")
    if last in _FROM_PYTHON:
        return False
    is_method = "." in name and last in _METHODS
    return owner.partition(".")[0] in _TORCH or is_method or last.strip("_") in known


def _library(evidence: Evidence, sampled: list[LineTime]) -> str:
    """The package below the line in which most of the time goes, in half a sentence; '' when it is the line's own."""
    by_package: dict[str, float] = defaultdict(float)
    for row in sampled:
        where = evidence.source_of(row.source)
        by_package[where.library.partition("/")[0] if where is not None else ""] += row.seconds
    package = max(by_package, key=lambda name: by_package[name])
    share = by_package[package] / sum(by_package.values())
    return f" ({share:.0%} of it in {package})" if package else ""


def _growth(evidence: Evidence) -> float:
    """How much longer the timed steps are than those in which operators were recorded.

    The samples come from all steps, the operators from a few early ones: where steps grow (a sequence that gets longer), the
    operators have grown with them.
    """
    then_s = evidence.observing.nearby_step_s
    return max(1.0, evidence.steps.step_s / then_s) if then_s else 1.0


RULE = rule(__name__, check, is_general=True, title="A line that spends its time in Python", rewrites_line=True)
