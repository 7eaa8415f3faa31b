"""Training in float8 on a GPU: what a step gains, which layers gain, and what it costs in loss; and products of few bits.

    python bench/float8_device.py [--out bench/results/<date>-<hardware>/float8_device.json] [--small]
        [--parts step,quality,errors,inference,layers,step-bfloat16] [--seconds 185]

One JSON line for each finding; a part that fails is a line with its error, and the others go on. Parts that come when the time
is up are skipped. Times are of the device, in interleaved rounds on random data; a ratio is that of the first way's time over
this one's (above 1: faster), paired by round, with its 95 % interval.

- `step`           a training step (forward, backward, fused AdamW over float32 weights) of Llama-like layers (width 4096,
                   feed-forward 11008, 4 layers, 4 x 2048 tokens) under autocast to bfloat16, each block compiled: bfloat16,
                   float8 with one scale a tensor, and with one a row; beside them without compiling. `loss` is the first step's
- `quality`        a language model over the characters of Python's manual (width 1024, 4 layers, 32 x 256 characters a step):
                   the held-out loss after training in bfloat16 and in float8 (all layers but the output), for several seeds of
                   weights and batches, the same for all ways; `difference` is the mean over seeds with its 95 % interval
                   (Student), `seeds_std` what seeds alone do. Judged in bfloat16 (`held`), and as it was trained
                   (`held_as_trained`). A second training in bfloat16 tells what is not of the way at all
- `errors`         one layer's output and both gradients, against float64 of the same bfloat16 numbers: relative, of all numbers
                   together; normal numbers, and such with a channel in 64 that is 30 times as large
- `inference`      schemes of flatout.shrink.quantise for one layer on this device: refused, or the time of a call and
                   the error; those that compile are left out
- `layers`         forward and backward of one layer by `float8.measure`, for 8192 rows
- `step-bfloat16`  `step` once more with weights in bfloat16, without autocast

With `--small` on any machine, to see that it runs: times then mean nothing, and what needs float8 is refused.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter
from typing import Any, Final

import torch
import torch.nn.functional as F
from beyond_machine import BEGAN, DEVICE, ON_GPU, RESULTS, say, settled
from torch import Tensor, nn

from flatout.blocks.training import float8
from flatout.core.errors import FlatoutError
from flatout.machine.measure.timer import Timing, compare_times

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.plain_tasks import manual

RECIPES: Final[tuple[float8.Recipe, ...]] = ("tensorwise", "rowwise")
STUDENT: Final = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
"""Half a 95 % interval of a mean in standard errors, by the number of samples."""


class Block(nn.Module):
    """A decoder layer: RMS norms, causal attention, a gated feed-forward (or GELU where `gated` is not)."""

    def __init__(self, width: int, inner: int, heads: int, *, gated: bool) -> None:
        super().__init__()
        self.heads, self.gated = heads, gated
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, (2 if gated else 1) * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(c, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        h = self.up(self.norm2(x))
        if self.gated:
            gate, h = h.chunk(2, -1)
            return x + self.down(F.silu(gate) * h)
        return x + self.down(F.gelu(h))


class Stack(nn.Module):
    """Blocks, for numbers that come as they are."""

    def __init__(self, width: int, inner: int, heads: int, num: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(
            width
        )  # so that the first block's input has a gradient as the others' have: one code for all
        self.blocks = nn.Sequential(*(Block(width, inner, heads, gated=True) for _ in range(num)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(self.norm(x))
        return y


class Characters(nn.Module):
    """A language model over 64 characters."""

    def __init__(self, width: int, heads: int, num: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4 * width, heads, gated=False) for _ in range(num)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        y: Tensor = self.head(self.norm(self.blocks(self.words(ids) + self.places(places))))
        return y


def initialised(model: nn.Module) -> nn.Module:
    """Weights as GPT-2's: normal, of 0.02."""
    for m in model.modules():
        if isinstance(m, nn.Linear | nn.Embedding):
            nn.init.normal_(m.weight, std=0.02)
    return model


def compiled(model: nn.Module) -> nn.Module:
    """Block by block: one is compiled, the others use its code."""
    if ON_GPU:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
    return model


def autocast(is_on: bool = True) -> AbstractContextManager[object]:
    return torch.autocast(DEVICE.type, dtype=torch.bfloat16) if is_on else nullcontext()


def ranges(timing: Timing) -> dict[str, Any]:
    """The median in ms and how many times as fast as the first."""
    call, ratio = timing.call_s, timing.ratio
    return {
        "ms": [round(1e3 * s, 4) for s in (call.value, call.low, call.high)],
        "faster": [round(1 / r, 4) for r in (ratio.value, ratio.high, ratio.low)] if ratio is not None else [1.0, 1.0, 1.0],
        "rounds": len(timing.samples_s),
    }  # fmt: skip


def left_s(options: argparse.Namespace) -> float:
    return float(options.seconds - (perf_counter() - BEGAN))


# -- what a step gains ---------------------------------------------------------------------------------------------------------


def step(options: argparse.Namespace, *, is_autocast: bool = True) -> None:
    width, inner, heads, num, batch, length = (64, 128, 2, 2, 2, 16) if options.small else (4096, 11008, 32, 4, 4, 2048)
    part = "step" if is_autocast else "step-bfloat16"
    dtype = torch.float32 if is_autocast else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(DEVICE):
        given = initialised(Stack(width, inner, heads, num)).to(dtype)
        x, y = (torch.randn(batch, length, width, dtype=torch.bfloat16) for _ in range(2))
    ways: dict[str, tuple[float8.Recipe | None, bool]] = {"bfloat16": (None, True)}
    ways |= {f"float8 {recipe}": (recipe, True) for recipe in RECIPES}
    ways |= {"float8 tensorwise, eager": ("tensorwise", False), "bfloat16, eager": (None, False)} if is_autocast else {}
    steps: dict[str, Callable[[], Tensor]] = {}
    for name, (recipe, is_compiled) in ways.items():
        began = perf_counter()
        try:
            model = copy.deepcopy(given)
            found = float8.convert(model, recipe=recipe) if recipe is not None else None
            run = stepping(compiled(model) if is_compiled else model, x, y, is_autocast)
            loss = float(run())
            run()
        except (FlatoutError, RuntimeError, AssertionError) as e:
            say({"part": part, "way": name, "refused": f"{type(e).__name__}: {str(e)[:400]}"})
            continue
        steps[name] = run
        say({"part": part, "way": name, "loss": loss, "first_s": round(perf_counter() - began, 2),
             "converted": len(found.converted) if found else 0, "left": found.left if found else {}})  # fmt: skip
    timed = compare_times(dict(steps), device=DEVICE, min_time_s=0.1 if options.small else 4.0, max_time_s=8.0)
    flop = 6 * sum(p.numel() for p in given.parameters() if p.dim() == 2) * batch * length
    for name, timing in timed.items():
        achieved = flop / timing.call_s.value / 1e12
        say(
            {
                "part": part,
                "way": name,
                "tokens": batch * length,
                **ranges(timing),
                "linear_tflop_per_s": round(achieved, 1),
            }
        )


def stepping(model: nn.Module, x: Tensor, y: Tensor, is_autocast: bool) -> Callable[[], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=ON_GPU)

    def run() -> Tensor:
        optimizer.zero_grad()
        with autocast(is_autocast):
            loss = F.mse_loss(model(x).float(), y.float())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


# -- what it costs in loss -----------------------------------------------------------------------------------------------------


def quality(options: argparse.Namespace) -> None:
    width, heads, num, length, batch = (32, 2, 2, 32, 4) if options.small else (1024, 16, 4, 256, 32)
    num_steps = options.steps if not options.small else 3
    task = manual(length=length, held=256 if not options.small else 8)
    x, y, held_x, held_y = (t.to(DEVICE) for t in task)
    say({"part": "quality", "windows": len(x), "steps": num_steps, "batch": batch, "length": length, "width": width})
    ways: dict[str, float8.Recipe | None] = {
        "bfloat16": None,
        **{f"float8 {r}": r for r in RECIPES},
        "bfloat16 again": None,
    }
    losses: dict[str, dict[str, list[float]]] = {}
    for seed in range(options.seeds if not options.small else 2):
        for way, recipe in ways.items():
            if left_s(options) < 60 and not options.small:
                say({"part": "quality", "way": way, "seed": seed, "skipped": "no time is left"})
                continue
            try:
                found = trained(seed, recipe, (width, heads, num, length), num_steps, batch, (x, y, held_x, held_y))
            except (FlatoutError, RuntimeError, AssertionError) as e:
                say({"part": "quality", "way": way, "seed": seed, "refused": f"{type(e).__name__}: {str(e)[:300]}"})
                continue
            say({"part": "quality", "way": way, "seed": seed, **{k: round(v, 5) for k, v in found.items()}})
            for what, value in found.items():
                losses.setdefault(way, {}).setdefault(what, []).append(value)
    for way, found_of in losses.items():
        for what in ("held", "held_as_trained", "train"):
            say({"part": "quality", "way": way, "loss": what, **differences(found_of[what], losses["bfloat16"][what])})


def trained(
    seed: int, recipe: float8.Recipe | None, sizes: tuple[int, ...], num_steps: int, batch: int, data: tuple[Tensor, ...]
) -> dict[str, float]:  # fmt: skip
    x, y, held_x, held_y = data
    torch.manual_seed(seed)
    model = initialised(Characters(*sizes)).to(DEVICE)
    found = float8.convert(model, recipe=recipe, sizes="any", skip=("head",)) if recipe is not None else None
    compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=ON_GPU)
    warm = max(1, num_steps // 10)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * i / num_steps))
    )
    order = torch.Generator().manual_seed(1000 + seed)
    last: list[Tensor] = []
    began = perf_counter()
    for i in range(num_steps):
        rows = torch.randint(len(x), (batch,), generator=order).to(DEVICE)
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x[rows]).float().flatten(0, 1), y[rows].flatten())
        loss.backward()
        optimizer.step()
        rates.step()
        if i >= num_steps - 50:
            last.append(loss.detach())
    as_trained = judged(model, held_x, held_y, batch)
    if found is not None:
        float8.revert(model, found)
    held = judged(model, held_x, held_y, batch) if found is not None else as_trained
    train = float(torch.stack(last).mean())
    return {"held": held, "held_as_trained": as_trained, "train": train, "seconds": perf_counter() - began}


@torch.no_grad()
def judged(model: nn.Module, x: Tensor, y: Tensor, batch: int) -> float:
    total = torch.zeros((), device=x.device)
    for a, b in zip(x.split(batch), y.split(batch), strict=True):
        with autocast(), torch.compiler.set_stance("force_eager"):
            total += F.cross_entropy(model(a).float().flatten(0, 1), b.flatten(), reduction="sum")
    return float(total) / y.numel()


def differences(losses: list[float], plain: list[float]) -> dict[str, Any]:
    """Paired by seed, to bfloat16's."""
    by_seed = [a - b for a, b in zip(losses, plain, strict=False)]
    num = len(by_seed)
    told: dict[str, Any] = {"mean": round(fmean(losses), 5), "seeds": num, "by_seed": [round(d, 5) for d in by_seed]}
    if num in STUDENT:
        half = STUDENT[num] * stdev(by_seed) / math.sqrt(num)
        told |= {"difference": [round(fmean(by_seed) + s * half, 5) for s in (0, -1, 1)],
                 "seeds_std": round(stdev(plain), 5)}  # fmt: skip
    return told


# -- one layer -----------------------------------------------------------------------------------------------------------------


def errors(options: argparse.Namespace) -> None:
    rows, k, n = (32, 64, 48) if options.small else (4096, 4096, 4096)
    for kind in ("normal", "outliers"):
        torch.manual_seed(0)
        x = torch.randn(rows, k, device=DEVICE)
        x[:, ::64] *= 30 if kind == "outliers" else 1
        x, g = x.bfloat16(), torch.randn(rows, n, device=DEVICE).bfloat16()
        layer = nn.Linear(k, n, bias=False, device=DEVICE, dtype=torch.bfloat16)
        nn.init.normal_(layer.weight, std=k**-0.5)
        w = layer.weight.detach().double()
        exact = x.double() @ w.T, g.double() @ w, g.double().T @ x.double()
        for way in ("bfloat16", *RECIPES):
            try:
                model = nn.Sequential(copy.deepcopy(layer))
                if way != "bfloat16":
                    float8.convert(model, recipe=way, sizes="any")  # type: ignore[arg-type]
                given = x.clone().requires_grad_()
                y = model(given)
                found = y, *torch.autograd.grad(y, [given, *model.parameters()], g)
            except (FlatoutError, RuntimeError, AssertionError) as e:
                say({"part": "errors", "kind": kind, "way": way, "refused": f"{type(e).__name__}: {str(e)[:300]}"})
                continue
            said = zip(("output", "input_gradient", "weight_gradient"), found, exact, strict=True)
            say(
                {
                    "part": "errors",
                    "kind": kind,
                    "way": way,
                    "shape": [rows, k, n],
                    **{name: off(a, b) for name, a, b in said},
                }
            )


def off(found: Tensor, exact: Tensor) -> float:
    return float(f"{float((found.detach().double() - exact).norm() / exact.norm()):.3g}")


def layers(options: argparse.Namespace) -> None:
    rows = 64 if options.small else 8192
    sizes = [(64, 64)] if options.small else [
        (4096, 4096), (2048, 2048), (1024, 1024), (8192, 8192), (1024, 4096), (4096, 1024), (4096, 11008), (2048, 8192),
        (8192, 1024), (1024, 2048),
    ]  # fmt: skip
    for recipe in RECIPES:
        for k, n in sizes if recipe == "tensorwise" else sizes[:4]:
            if left_s(options) < 10 and not options.small:
                say({"part": "layers", "k": k, "n": n, "recipe": recipe, "skipped": "no time is left"})
                continue
            told = {"part": "layers", "rows": rows, "k": k, "n": n, "recipe": recipe,
                    "torchao_says": float8.size_refusal(k, n, recipe=recipe) or "gains"}  # fmt: skip
            try:
                found = float8.measure(rows, nn.Linear(k, n, bias=False, device=DEVICE), recipe=recipe, max_time_s=0.6)
            except (FlatoutError, RuntimeError, AssertionError) as e:
                say({**told, "refused": f"{type(e).__name__}: {str(e)[:300]}"})
                continue
            say({**told, **ranges(found)})


def inference(options: argparse.Namespace) -> None:
    from flatout.shrink.quantise import schemes

    k, n = (64, 128) if options.small else (4096, 11008)
    torch.manual_seed(0)
    layer = nn.Linear(k, n, bias=False, device=DEVICE, dtype=torch.bfloat16 if ON_GPU else torch.float32).eval()
    nn.init.normal_(layer.weight, std=k**-0.5)
    say({"part": "inference", "schemes": [*schemes.ALL], "tried_by_default": schemes.default(DEVICE)})
    made: dict[str, nn.Module] = {"as it is": layer}
    for name, scheme in schemes.ALL.items():
        if name.endswith("-compiled"):
            continue
        why = schemes.refusal(scheme, layer)
        if why is None and not scheme.is_calibrated:
            try:
                with torch.no_grad():
                    made[name] = scheme.make(layer, None)
            except (FlatoutError, RuntimeError, AssertionError, ImportError, TypeError, ValueError) as e:
                why = f"{type(e).__name__}: {str(e)[:300]}"
        if why is not None:
            say({"part": "inference", "scheme": name, "refused": why})
    for rows in (4, 32) if options.small else (1, 32, 512, 8192):
        for told in called(made, torch.randn(rows, k, device=DEVICE, dtype=layer.weight.dtype)):
            say({"part": "inference", "rows": rows, "k": k, "n": n, **told})


def called(made: dict[str, nn.Module], x: Tensor) -> list[dict[str, Any]]:
    """Each scheme's error and time, as a host calls it."""
    exact = x.double() @ made["as it is"].weight.detach().double().T  # type: ignore[operator]
    errors_of: dict[str, float] = {}
    runs: dict[str, Callable[[], object]] = {}
    told: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name, module in made.items():
            try:
                errors_of[name] = off(module(x), exact)
                runs[name] = lambda module=module: module(x)  # type: ignore[misc]
            except (FlatoutError, RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as e:
                told.append({"scheme": name, "refused": f"{type(e).__name__}: {str(e)[:300]}"})
        for name, timing in compare_times(runs, device=DEVICE, min_time_s=0.1, max_time_s=1.0).items():
            told.append({"scheme": name, "error": errors_of[name], **ranges(timing)})
    return told


PARTS: Final[dict[str, Callable[[argparse.Namespace], None]]] = {
    "step": step,
    "quality": quality,
    "errors": errors,
    "inference": inference,
    "layers": layers,
    "step-bfloat16": lambda options: step(options, is_autocast=False),
}

NEEDED_S: Final = {"step-bfloat16": 45.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=185.0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = (
        64  # ways share the blocks' code: past the limit they would run eagerly, unsaid
    )
    say({"part": "machine", "torch": torch.__version__, "python": platform.python_version(), "small": options.small,
         "device": torch.cuda.get_device_name() if ON_GPU else platform.processor() or "cpu",
         "float8": float8.refusal(DEVICE) or float8.absence() or "there"})  # fmt: skip
    for name in options.parts.split(","):
        if left_s(options) < NEEDED_S.get(name, 10) and not options.small:
            say({"part": name, "skipped": "no time is left"})
            continue
        try:
            PARTS[name](options)
        except Exception as e:  # noqa: BLE001 the other parts go on
            say({"part": name, "error": f"{type(e).__name__}: {str(e)[:800]}", "where": traceback.format_exc()[-1500:]})
        settled()
        torch.compiler.reset()
        if options.out:  # after each part: what is there stays if the next one dies
            write(options.out)
    return 0


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(r) for r in RESULTS) + "\n")


if __name__ == "__main__":
    sys.exit(main())
