"""What training less costs: predicted before acting, and measured, on five plain models.

    python bench/adapting.py [--out bench/results/<date>-<hardware>/adapting.json] [--only mlp,unet] [--threads 1] [--seconds 30]

MLP, CNN, GRU, transformer and U-Net of tests/plain_models.py, at widths where a step takes 10 to 80 ms on one core, random data,
AdamW, mean of squares. Each method (low-rank pairs, DoRA, bottlenecks, a prompt where there are tokens, all but the last layers
frozen, biases only) is first predicted by flatout.shrink.adapt, on copies; then the model is adapted and measured:

  parameters   numbers that the optimizer was given
  training     bytes of gradients and of the optimizer's state, as they are after a step, and of what forward keeps for backward:
               what torch's allocator has given out and not got back when forward has returned (torch.profiler)
  step         forward, backward, optimizer; the plain model's full training and all methods in rounds, each sample after an
               untimed call of the same, in an order that turns; ratios to the plain step are paired by round

`error` is predicted over measured minus 1; of the steps, of the ratio to the plain step. For pairs the rounding that merging
costs: distance of outputs from float64 over their largest number, adapted and merged, after the steps that were timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from native_machine import hardware, versions
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from flatout.core.records.adapt import BitFit, Bottleneck, Freeze, Lora, Method, Prediction, Prompt
from flatout.machine.measure.timer import HostClock, compare_times
from flatout.shrink.adapt.adapted_model import Adapted, adapt
from flatout.shrink.adapt.prediction import WarmedClock, mean_square_loss, predict_step

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.plain_models import plain

Record = dict[str, Any]
METHODS: dict[str, Method] = {
    "lora": Lora(),
    "dora": Lora(is_dora=True),
    "bottleneck": Bottleneck(),
    "prompt": Prompt(before="blocks"),
    "freeze": Freeze(last=2),
    "bitfit": BitFit(),
}
MODELS: dict[str, tuple[int, Callable[[], Tensor]]] = {
    "mlp": (1024, lambda: torch.randn(256, 64)),
    "cnn": (64, lambda: torch.randn(64, 1, 8, 8)),
    "gru": (128, lambda: torch.randn(32, 32, 16)),
    "transformer": (256, lambda: torch.randint(0, 64, (8, 56))),
    "unet": (32, lambda: torch.randn(16, 1, 16, 16)),
}


class Case(NamedTuple):
    model: nn.Module
    inputs: tuple[Tensor, ...]


def case_of(name: str) -> Case:
    """The same each time; the global random state is left as it was."""
    width, make = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        inputs = (make(),)
    return Case(plain(name, width=width).module, inputs)


class Training:
    """A model's step, and what it holds."""

    def __init__(self, case: Case, method: Method | None) -> None:
        self.case = case
        self.adapted: Adapted | None = adapt(case.model, method) if method is not None else None
        self.parameters = list((self.adapted or case.model).parameters())
        self.optimizer = torch.optim.AdamW(self.parameters)

    def forward(self) -> Tensor:
        return mean_square_loss(self.case.model(*self.case.inputs))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    def held(self) -> Record:
        """Numbers trained, and bytes, after a step."""
        self.step()
        state = [t for held in self.optimizer.state.values() for t in held.values() if isinstance(t, Tensor)]
        return {
            "trained_parameters": sum(p.numel() for p in self.parameters),
            "gradient_bytes": sum(p.grad.nbytes for p in self.case.model.parameters() if p.grad is not None),
            "state_bytes": sum(t.nbytes for t in state),
            "saved_bytes": self.saved_bytes(),
        }

    def saved_bytes(self) -> int:
        """By torch's allocator: what forward leaves behind."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            value = self.forward()
        events = seen.events()
        assert events is not None
        left = sum(event.self_cpu_memory_usage for event in events)
        del value
        return int(left)


def methods_for(name: str) -> dict[str, Method]:
    """A prompt only where there are tokens; the GRU has two modules, of which the last is the head."""
    found = {key: method for key, method in METHODS.items() if key != "prompt" or name == "transformer"}
    return found | ({"freeze": Freeze(last=1)} if name == "gru" else {})


def measured(name: str, methods: dict[str, Method], seconds: float) -> list[Record]:
    case = case_of(name)
    found = predict_step(case.model, case.inputs, *methods.values(), max_time_s=seconds)
    trainings = {"plain": Training(case_of(name), None)}
    trainings |= {key: Training(case_of(name), method) for key, method in methods.items()}
    held = {key: training.held() for key, training in trainings.items()}
    steps = {key: training.step for key, training in trainings.items()}
    times = compare_times(steps, min_time_s=seconds / 2, max_time_s=seconds, clock=WarmedClock(HostClock()))
    rows = []
    for key, prediction in zip(methods, found, strict=True):
        ratio = times[key].ratio
        assert ratio is not None
        rows.append(
            {
                "part": "methods",
                "model": name,
                "method": key,
                "of_parameters": prediction.plain.trained_parameters,
                **{f"predicted_{what}": getattr(prediction.adapted, what) for what in held[key]},
                **held[key],
                **{f"plain_{what}": value for what, value in held["plain"].items()},
                "predicted_ratio": [prediction.step_ratio, prediction.step_ratio_low, prediction.step_ratio_high],
                "ratio": [ratio.value, ratio.low, ratio.high],
                "predicted_step_s": prediction.adapted.step_s,
                "step_s": times[key].call_s.value,
                "plain_step_s": times["plain"].call_s.value,
                "rounds": len(times[key].samples_s),
                "error": errors(prediction, held[key], held["plain"], ratio.value),
                **merging(trainings[key], key),
            }
        )
    return rows


def errors(prediction: Prediction, held: Record, plain_held: Record, ratio: float) -> Record:
    """Of bytes, of how far they fall below the plain model's, and of the step's ratio."""
    total = sum(held[what] for what in ("gradient_bytes", "state_bytes", "saved_bytes"))
    return {
        "parameters": prediction.adapted.trained_parameters / held["trained_parameters"] - 1,
        "training_bytes": prediction.adapted.training_bytes / total - 1,
        "step_ratio": prediction.step_ratio / ratio - 1,
    }


def merging(training: Training, key: str) -> Record:
    if key not in ("lora", "dora") or training.adapted is None:
        return {}
    merged = training.adapted.merge(*training.case.inputs)
    training.adapted.unmerge()
    return {"adapted_error": merged.adapted_error, "merged_error": merged.merged_error}


def table(rows: list[Record]) -> str:
    columns = {"trained": 10, "of": 9, "MB": 8, "of ": 8, "error": 8, "step": 8, "said": 7, "error ": 8, "merged": 10}
    lines = [f"{'model':12}{'method':12}" + "".join(f"{name.strip():>{size}}" for name, size in columns.items())]
    for row in rows:
        said, seen = row["predicted_ratio"][0], row["ratio"][0]
        total = sum(row[what] for what in ("gradient_bytes", "state_bytes", "saved_bytes")) / 1e6
        whole = sum(row[f"plain_{what}"] for what in ("gradient_bytes", "state_bytes", "saved_bytes")) / 1e6
        error = row["error"]
        exact = "" if error["parameters"] == 0 else "!"
        merged = f"{row['merged_error']:.1e}" if "merged_error" in row else ""
        lines.append(
            f"{row['model']:12}{row['method']:12}{row['trained_parameters']:>10}{exact}{row['of_parameters']:>9}{total:>8.2f}{whole:>8.2f}"
            f"{error['training_bytes']:>+8.1%}{seen:>8.3f}{said:>7.3f}{error['step_ratio']:>+8.1%}{merged:>10}"
        )
    worst = {what: max(abs(row["error"][what]) for row in rows) for what in rows[0]["error"]}
    lines.append("worst: " + ", ".join(f"{what} {value:.1%}" for what, value in worst.items()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="of predicting a model, and of measuring it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = {"part": "machine", **hardware(), **versions(), "threads": options.threads, "seconds": options.seconds}
    rows = []
    for name in options.only.split(","):
        rows += measured(name, methods_for(name), options.seconds)
        print(table([row for row in rows if row["model"] == name]), flush=True)
    print(table(rows))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps(row) + "\n" for row in (machine, *rows)))


if __name__ == "__main__":
    main()
