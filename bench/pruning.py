"""Half of the channels of the ten plain models taken away: flatout's `prune` beside torch-pruning, in one run.

    python bench/pruning.py [--out bench/results/<date>-<hardware>/pruning.json] [--only gru,tcn] [--quick]

torch-pruning gets the same inputs and ratio, the last layers named as ignored, and `num_heads` of the attention's projections, as
its manual has it (MagnitudePruner, group L2 importance, one step). Each result is asked:

  forward, export, compile   does it run on the inputs (torch-pruning: also on the narrowed states), through torch.export, and
                             through torch.compile with the back end that is named
  parameters                 what is left, as a fraction
  faster                     original over smaller on one thread: paired, interleaved rounds, median and interval
  error                      largest difference of the first output to the masked original in float64, over its largest number.
                             The reference is bench/pruning_masked.py's: it reads off the smaller model's weights what stays,
                             and shares nothing with either peer. States are zeros

Prediction: half of the width leaves a quarter of inner matrices and half of those at the ends, so 0.25-0.4 of the parameters, and
2-3.5x faster where products take the time.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from pruning_masked import disturb, error
from tests.plain_models import PLAIN, Plain, plain

from flatout.core.errors import FlatoutError
from flatout.machine.measure.timer import compare_times
from flatout.shrink.prune import map_state, prune

Record = dict[str, Any]
WIDTHS = {
    "mlp": 512,
    "cnn": 64,
    "separable": 128,
    "gru": 256,
    "gru_step": 512,
    "lstm_step": 512,
    "tcn": 128,
    "transformer": 256,
    "encoder": 256,
    "unet": 32,
}
FAILURES = (RuntimeError, TypeError, ValueError, AssertionError, LookupError, AttributeError, NotImplementedError)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines; the table goes beside it, as .txt")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PLAIN), metavar="MODEL,...")
    parser.add_argument("--quick", action="store_true", help="to see that it runs; the figures mean little")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args()
    if find_spec("torch_pruning") is None:
        parser.error("torch-pruning, the peer, is not installed; pip install 'flatout[bench]'")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    records: list[Record] = [{"part": "machine", **machine(), "is_quick": options.quick}]
    for name in options.only:
        for peer, work in (("flatout", ours), ("torch_pruning", theirs)):
            records.append(
                {
                    "part": "model",
                    "model": name,
                    "peer": peer,
                    **row(name, work, backend=options.backend, is_quick=options.quick),
                }
            )
            print(json.dumps(records[-1]), flush=True)
    text = table(records)
    print(f"\n{text}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps(record) + "\n" for record in records))
        options.out.with_suffix(".txt").write_text(text + "\n")
    return 0


def machine() -> Record:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    packages = {name: version(name) for name in ("torch", "torch-pruning")}
    return {"cpu": cpu, "python": platform.python_version(), "num_threads": torch.get_num_threads(), **packages}


def ours(case: Plain) -> tuple[nn.Module, tuple[Tensor, ...]]:
    pruned = prune(case.module, case.inputs, num_state=case.num_state)
    first = len(case.inputs) - case.num_state
    inputs = (*case.inputs[:first], *map_state(pruned.plan, case.inputs[first:]))
    return pruned.model, inputs


def theirs(case: Plain) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import torch_pruning as tp

    model = copy.deepcopy(case.module).eval()
    last = [module for name, module in model.named_modules() if name == "head" or name == "5"]
    heads = {m: 4 for name, m in model.named_modules() if name.endswith((".qkv", "self_attn"))}
    pruner = tp.pruner.MagnitudePruner(
        model,
        case.inputs,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=last,
        num_heads=heads,
        prune_num_heads=True,
        head_pruning_ratio=0.5,
    )
    pruner.step()
    return model, narrowed(case, model)


def narrowed(case: Plain, model: nn.Module) -> tuple[Tensor, ...]:
    """States as wide as the cells are now: torch-pruning does not say."""
    cells = [m for m in model.modules() if isinstance(m, nn.RNNCellBase)]
    if not cells or case.num_state == 0:
        return case.inputs
    first = len(case.inputs) - case.num_state
    widths = [cell.weight_hh.shape[1] for cell in cells for _ in range(case.num_state // len(cells))]
    return (*case.inputs[:first], *(x[:, :w] for x, w in zip(case.inputs[first:], widths, strict=True)))


def row(name: str, work: Callable[[Plain], Any], *, backend: str, is_quick: bool) -> Record:
    case = plain(name, width=WIDTHS[name]) if not is_quick else plain(name)
    case.module.eval()
    disturb(case.module)
    before = sum(p.numel() for p in case.module.parameters())
    try:
        model, inputs = work(case)
    except (*FAILURES, FlatoutError) as e:
        return {"because": first_line(e), "forward": False, "export": False, "compile": False}
    record: Record = {"parameters": sum(p.numel() for p in model.parameters()) / before}
    model.eval()

    def compiled() -> object:
        torch._dynamo.reset()
        return torch.compile(model, backend=backend)(*inputs)

    with torch.no_grad():
        for key, ask in {
            "forward": lambda: model(*inputs),
            "export": lambda: torch.export.export(model, inputs).module()(*inputs),
            "compile": compiled,
        }.items():
            record[key], because = asked(ask)
            record |= {f"{key}_because": because} if because else {}
        if record["forward"]:
            record["error"] = error(case.module, model, case.inputs, inputs)
            record |= timed(case, model, inputs, is_quick=is_quick)
    return record


def asked(ask: Callable[[], object]) -> tuple[bool, str]:
    try:
        ask()
    except FAILURES as e:
        return False, first_line(e)
    return True, ""


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def timed(case: Plain, model: nn.Module, inputs: tuple[Tensor, ...], *, is_quick: bool) -> Record:
    calls = {"smaller": lambda: model(*inputs), "original": lambda: case.module(*case.inputs)}
    times = compare_times(calls, min_time_s=0.05 if is_quick else 0.8, max_time_s=0.2 if is_quick else 2.5)
    ratio = times["original"].ratio
    assert ratio is not None
    return {
        "faster": [ratio.value, ratio.low, ratio.high],
        "num_rounds": ratio.num_samples,
        "original_s": times["original"].call_s.value,
        "smaller_s": times["smaller"].call_s.value,
    }


def table(records: list[Record]) -> str:
    rows = [
        f"{'model':<12}{'peer':<15}{'forward':<9}{'export':<8}{'compile':<9}{'parameters':<12}{'faster':<22}{'error':<10}what"
    ]
    for r in (r for r in records if r["part"] == "model"):
        faster = "{:.2f} [{:.2f}, {:.2f}]".format(*r["faster"]) if "faster" in r else "-"
        marks = [("yes" if r[key] else "NO") for key in ("forward", "export", "compile")]
        left = f"{r['parameters']:.2f}" if "parameters" in r else "-"
        error = f"{r['error']:.1e}" if r.get("error") is not None else "-"
        what = next((r[k] for k in ("because", "forward_because", "export_because", "compile_because") if k in r), "")
        if not what and r.get("parameters") == 1.0:
            what = "left whole, without a word"
        rows.append(
            f"{r['model']:<12}{r['peer']:<15}{marks[0]:<9}{marks[1]:<8}{marks[2]:<9}{left:<12}{faster:<22}{error:<10}{what[:110]}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    raise SystemExit(main())
