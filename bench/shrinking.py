"""The chooser of `flatout shrink` on twelve models with nothing but their outputs to keep: what it takes, and what that gains.

    python bench/shrinking.py [--out bench/results/<date>-<hardware>/shrinking.json] [--only lstm_128,mlp_4096] [--seconds 2]

Models: those of bench/quantising.py (a 1024-4096-1024 MLP and the ten of tests/plain_models.py in their widths), and an LSTM cell
of 128 with its state carried; random weights, batch 1 on one thread. The metric is 1 less the largest distance of a sample's
outputs from the model's own in float64, over the largest of them; 0.01 of it may go. There are no data to train on, so that what
a smaller model loses stays lost.

Each composition is timed in rounds with the model as it is. Told: all points, what was chosen, its speed-up proved once more;
its speed-up over the native engine in float32, where there is one, in rounds with that; and torchao's weight-only int8, eager, in
rounds with the model. "never slower" is broken where the interval of what was chosen lies below 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from native_machine import hardware, versions
from quantising import FAILURES, WIDTHS, plain_model, torchao
from torch import Tensor, nn

from flatout.core.records.reduction import Option
from flatout.core.records.shrink import Shrunk
from flatout.core.registry import reductions
from flatout.machine.measure.timer import compare_times
from flatout.report.parts.shrink import shrunk_blocks
from flatout.report.text import plain_lines
from flatout.shrink.candidate import CandidateModel, ShrinkTask, StatefulModel
from flatout.shrink.compose.explorer import Composition
from flatout.shrink.compose.shrink import Allowance, ShrinkSettings, find_cheapest
from flatout.shrink.compose.trials import TrialRunner

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.plain_models import Plain

HERE = f"{Path(__file__).parent.parent}/"
NUM_SAMPLES = 32
NAMES = ["mlp_4096", "lstm_128", *WIDTHS]


class Lstm(nn.Module):
    """An LSTM cell of 128 on 128, its hidden state as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(128, 128)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.cell(x, (h, c))
        return h, h, c


def original(name: str) -> Plain:
    if name == "lstm_128":
        torch.manual_seed(0)
        return Plain(Lstm().eval(), (torch.randn(1, 128), torch.zeros(1, 128), torch.zeros(1, 128)), 2)
    return plain_model(name, 1)


def nearness(plain: Plain) -> Callable[[Any], list[float]]:
    """The metric: samples one after the other for a state, else as batches of one."""
    generator = torch.Generator().manual_seed(1)
    first = plain.inputs[0]
    size = (NUM_SAMPLES, *first.shape[1:])
    xs = (
        torch.randn(size, generator=generator)
        if first.is_floating_point()
        else torch.randint(0, 64, size, generator=generator)
    )
    exact = _outputs(_stepping(_exact(plain), plain), xs)
    scale = float(exact.abs().max())

    def metric(call: Any) -> list[float]:
        if plain.num_state:
            call.reset()
        away = (_outputs(call, xs) - exact).abs().flatten(1).amax(1) / scale
        return (1 - away).tolist()

    return metric


def _exact(plain: Plain) -> Callable[..., Any]:
    import copy

    model = copy.deepcopy(plain.module).double()

    def call(*inputs: Tensor) -> Any:
        return model(*(x.double() if x.is_floating_point() else x for x in inputs))

    return call


def _stepping(call: Callable[..., Any], plain: Plain) -> Callable[..., Any]:
    return StatefulModel(call, plain.inputs[len(plain.inputs) - plain.num_state :]) if plain.num_state else call


def _outputs(call: Callable[..., Any], xs: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([call(x[None]) for x in xs]).double()


def bench(name: str, seconds: float) -> dict[str, Any]:
    plain, began = original(name), perf_counter()
    task = ShrinkTask(inputs=plain.inputs, num_state=plain.num_state, evaluate=nearness(plain))
    runner = TrialRunner(CandidateModel.of(plain.module, task), reductions(), "latency", seconds=seconds)
    settings = ShrinkSettings(name, "latency", Allowance.of("0.01"), is_cost=False, budget_s=600)
    found, selected = find_cheapest(
        runner,
        reductions(),
        settings,
        on_progress=lambda message: print(f"{name}: {message}", file=sys.stderr, flush=True),
    )
    print("\n".join(plain_lines(shrunk_blocks(found))), end="\n\n", flush=True)
    best = found.best
    return {
        "model": name,
        "chosen": best.name,
        "faster": best.faster,
        "lost": best.lost,
        "bytes": [found.original.num_bytes, best.num_bytes],
        "over_native": over_native(runner, found, selected, seconds),
        "torchao_int8_faster": beside(plain, seconds),
        "is_slower": best.faster[2] < 1,
        "points": [{"name": p.name, "us": p.call_s[0] * 1e6, "faster": p.faster, "lost": p.lost} for p in found.points],
        "untried": [{"name": u.name, "because": u.because.replace(HERE, "")} for u in found.untried],
        "seconds": perf_counter() - began,
    }


def over_native(runner: TrialRunner, found: Shrunk, selected: Composition, seconds: float) -> Any:
    """What was chosen over the native engine in float32; None where that engine cannot take the model."""
    point = next((p for p in found.points if p.name == "native"), None)
    if point is None:
        return None
    native = tuple(
        Option(reduction=p.id, name=point.name, parameters=p.parameters, because=p.because) for p in point.reductions
    )
    return faster({"given": timed_of(runner.candidate(native)), "other": timed_of(runner.candidate(selected))}, seconds)


def timed_of(candidate: CandidateModel) -> Callable[[], Any]:
    return candidate.timed or (lambda: candidate.call(*candidate.inputs))


def faster(calls: dict[str, Callable[[], Any]], seconds: float) -> Any:
    """How many times faster `other` is than `original`, with its interval, in rounds of both."""
    with torch.inference_mode():
        ratio = compare_times(calls, min_time_s=seconds / 2, max_time_s=seconds)["other"].ratio
    return None if ratio is None else (1 / ratio.value, 1 / ratio.high, 1 / ratio.low)


def beside(plain: Plain, seconds: float) -> Any:
    """torchao's weight-only int8 over the model; why not, where it has none."""
    try:
        other = torchao(plain.module, "Int8WeightOnlyConfig")
        return faster({"given": lambda: plain.module(*plain.inputs), "other": lambda: other(*plain.inputs)}, seconds)
    except FAILURES as e:
        return f"{type(e).__name__}: {str(e)[:120]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    if unknown := [name for name in options.only.split(",") if name not in NAMES]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(NAMES)}")
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = [{"part": "machine", **hardware(), **versions()}]
    for name in options.only.split(","):
        records.append(bench(name, options.seconds))
        print(json.dumps(records[-1]), flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text("".join(json.dumps(r) + "\n" for r in records))
    print(f"\n{'model':12}{'faster':>8}{'over native':>13}{'lost':>9}{'torchao':>9}  chosen")
    for r in records[1:]:
        native, ao = (
            f"{one[0]:.2f}" if isinstance(one, tuple) else "-" for one in (r["over_native"], r["torchao_int8_faster"])
        )
        print(f"{r['model']:12}{r['faster'][0]:>8.2f}{native:>13}{r['lost']:>9.2g}{ao:>9}  {r['chosen']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
