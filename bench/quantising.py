"""Fewer bits on a CPU: eleven plain models as they are, in torchao's and torch's 8 bits, and as `flatout` chooses them.

    python bench/quantising.py [--out bench/results/<date>-<hardware>/quantising.json] [--only mlp_4096,gru] [--batch 1,16]
                               [--threads 1] [--budget 0.01] [--compiled]

Models: those of tests/plain_models.py in the widths below, a 1024-4096-1024 MLP, and two LSTM cells of 128 with a head, whose
state is carried; random weights and inputs. Peers, all in inference mode, called from Python:

  eager               float32, as it is; eager_copy: the same once more, for what a ratio is when there is nothing to see
  ao_int8             torchao Int8WeightOnlyConfig, eager; ..._compiled under torch.compile (with --compiled: minutes a model)
  ao_dynamic          torchao Int8DynamicActivationInt8WeightConfig, eager; ..._compiled
  torch_dynamic       torch.ao.quantization.quantize_dynamic of Linear and recurrent layers, as long as torch has it (deprecated)
  chosen              flatout.shrink.quantise.quantise_where_faster(budget=...), without a metric

All are timed in interleaved rounds: peers with eager, and chosen with eager and its copy; medians, and the ratio to eager paired
by round with its interval. Error: the largest distance to float64 among the outputs, over its norm. "never slower" is broken
where the whole interval of `chosen` lies above 1.02. Predicted: of the large MLP at batch 1, which waits for its weights, the
bytes that are left; beside the measured ratio.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from native_machine import hardware, versions
from torch import Tensor, nn

from flatout.machine.measure.timer import Timing, compare_times
from flatout.shrink.float64_reference import float64_outputs, relative_norm_error
from flatout.shrink.quantise import quantise_where_faster, stored_bytes

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.plain_models import Plain, plain

WIDTHS = {
    "mlp": 512,
    "cnn": 64,
    "separable": 64,
    "gru": 256,
    "gru_step": 256,
    "lstm_step": 128,
    "tcn": 128,
    "transformer": 256,
    "encoder": 256,
    "unet": 32,
}
NOISE = 1.02
FAILURES = (
    RuntimeError,
    NotImplementedError,
    ImportError,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
    AssertionError,
)


def mlp_4096() -> Plain:
    layers = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return Plain(layers, (torch.randn(16, 1024),))


def plain_model(name: str, batch: int) -> Plain:
    """A model and its inputs for a batch."""
    torch.manual_seed(0)
    module, inputs, num_state = mlp_4096() if name == "mlp_4096" else plain(name, width=WIDTHS[name])
    wide = tuple(x.repeat(-(-batch // len(x)), *[1] * (x.dim() - 1))[:batch].clone() for x in inputs)
    return Plain(module.eval(), wide, num_state)


def torchao(model: nn.Module, config: str) -> nn.Module:
    import torchao.quantization as ao

    copied = copy.deepcopy(model)
    ao.quantize_(copied, getattr(ao, config)(set_inductor_config=False))
    return copied


def torch_dynamic(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, as the table says
        kinds = {nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell}
        return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), kinds)


def peers(model: nn.Module, inputs: Sequence[Tensor], *, is_compiled: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Models by peer, each having run, and why others have not."""
    makers: dict[str, Callable[[], Any]] = {
        "ao_int8": lambda: torchao(model, "Int8WeightOnlyConfig"),
        "ao_dynamic": lambda: torchao(model, "Int8DynamicActivationInt8WeightConfig"),
        "torch_dynamic": lambda: torch_dynamic(model),
    }
    if is_compiled:
        makers["compiled"] = lambda: torch.compile(copy.deepcopy(model))
        makers["ao_int8_compiled"] = lambda: torch.compile(torchao(model, "Int8WeightOnlyConfig"))
        makers["ao_dynamic_compiled"] = lambda: torch.compile(torchao(model, "Int8DynamicActivationInt8WeightConfig"))
    there, missing = {"eager": model}, {}
    for name, make in makers.items():
        try:
            there[name] = make()
            there[name](*inputs)
        except FAILURES as e:
            there.pop(name, None)
            missing[name] = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:160] if str(e).strip() else ''}"
    return there, missing


def rounds(there: dict[str, Any], inputs: Sequence[Tensor], seconds: float) -> dict[str, Timing]:
    """All of them in interleaved rounds; ratios are to the first."""
    runs: dict[str, Callable[[], object]] = {peer: (lambda run=run: run(*inputs)) for peer, run in there.items()}
    return compare_times(runs, min_time_s=seconds, max_time_s=10 * seconds)


def bench(name: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    model, inputs, _ = plain_model(name, batch)
    exact = float64_outputs(model, inputs)
    selected = quantise_where_faster(model, inputs, budget=options.budget)
    with torch.inference_mode():
        there, missing = peers(model, inputs, is_compiled=options.compiled)
        # Apart from the others, whose working sets would leave every small model cold, its copy like itself.
        near = {"eager": model, "eager_copy": copy.deepcopy(model), "chosen": selected.module}
        timed = {**rounds(there, inputs, options.seconds), **rounds(near, inputs, options.seconds)}
        there |= near
        errors = {peer: relative_norm_error(run(*inputs), exact) for peer, run in there.items()}
    found: dict[str, Any] = {"model": name, "batch": batch, "threads": torch.get_num_threads(), "missing": missing}
    found["schemes"] = selected.quantised.schemes
    found["weight_bytes"] = [stored_bytes(model), stored_bytes(selected.module)]
    found["peers"] = {
        peer: {
            "call_s": t.call_s.value,
            "ratio": None if t.ratio is None else [t.ratio.value, t.ratio.low, t.ratio.high],
            "error": errors[peer],
        }
        for peer, t in timed.items()
    }
    ratio = timed["chosen"].ratio
    found["is_never_slower"] = ratio is not None and ratio.low < NOISE
    return found


def line(found: dict[str, Any]) -> str:
    cells = [f"{found['model']:12s} batch {found['batch']:3d}"]
    for peer, told in found["peers"].items():
        ratio = "" if told["ratio"] is None else " x{:.2f} [{:.2f}, {:.2f}]".format(*told["ratio"])
        cells.append(f"  {peer:20s} {told['call_s'] * 1e6:9.1f} us{ratio:22s} error {told['error']:.2g}")
    cells += [f"  {peer:20s} not there: {why}" for peer, why in found["missing"].items()]
    before, after = found["weight_bytes"]
    cells.append(f"  weights {before / 2**20:.2f} -> {after / 2**20:.2f} MiB; {len(found['schemes'])} layers taken")
    if found["model"] == "mlp_4096" and found["batch"] == 1:
        measured = found["peers"]["chosen"]["ratio"][0]
        cells.append(f"  predicted from bytes alone: x{after / before:.2f} of the time; measured x{measured:.2f}")
    cells.append("  never slower: " + ("held" if found["is_never_slower"] else "BROKEN"))
    return "\n".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=1.0, help="of samples, for all peers of a model together")
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = options.only.split(",") if options.only else ["mlp_4096", *WIDTHS]
    lines = [{**hardware(), **versions(), "threads": options.threads, "budget": options.budget}]
    for name in names:
        for batch in (int(b) for b in options.batch.split(",")):
            lines.append(bench(name, batch, options))
            print(line(lines[-1]), flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(found) + "\n" for found in lines))


if __name__ == "__main__":
    main()
