"""Inference beyond the card: layers that do not fit, and tokens one at a time, beside the bounds and beside what people use.

    python bench/beyond_device.py [--out bench/results/<date>-<hardware>/beyond_device.json] [--small]
        [--parts kernels,streaming,accelerate,decode] [--minutes 8] [--resident-gib 40] [--layers 80]

Numerics come first in each part; a part that fails is a line with its error, and the others go on.

- `kernels`    products of one row and of 8 with the weights of a 7 B-shaped model in 4, 8 and 16 bits, each in its fastest way of
               those measured, as a fraction of the device's copy bandwidth; torch's own product beside those of 16 bits; weights
               that are packed for the matrix units (`packed`) beside them, with the norm before them and the gate behind
- `streaming`  a 70 B-shaped stack (80 layers of 8192, feed-forward 28672, 64 heads, 8 of keys; 1.7 GB each in bfloat16, random
               weights) with `--resident-gib` of the device: seconds a pass as it is and with int4 in transit, for one token and
               for a prompt, beside max(compute, bytes over the measured link) and the prediction made before. Each streamed layer
               has its own pinned memory. `checked`: a short stack on the same ring, against the layers on the device.
- `accelerate` the same layers, and as many of them on the device, by accelerate.cpu_offload; weights that it keeps on the host
               are shared by layers 8 apart (8 x 1.7 GB, more than any cache holds), since both do not fit the host at once
- `decode`     a 7 B-shaped model (32 layers of 4096, feed-forward 11008, 32 heads, 32000 words), one sequence, `--context` places
               in a static cache: a step compiled and captured, in bfloat16 and int4, plain eager beside it, and a layer of five
               kernels (`packed`), and all layers in one launch (`megakernel`); bytes over the copy bandwidth are the
               bound. Before: logits of each against float64, with the same tokens given to all. `marginal_us`: of a captured
               step, how much later each kernel ends than the one before

Random weights are drawn on the device. With `--small` on any machine, to see that it runs: times then mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from beyond_decoding import decode, kernels
from beyond_machine import BEGAN, DEVICE, GIB, ON_GPU, RESULTS, as_dict, drawn, say, seconds, settled
from torch import Tensor, nn

from flatout.blocks.inference.streaming.layers import stream_layers
from flatout.blocks.inference.streaming.placement import LayerSizes, select_streamed_layers
from flatout.blocks.inference.streaming.transit import rounded_in_transit

# -- a stack of layers ---------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer as of Llama's: RMS norms, rotary positions, grouped heads, a gated feed-forward; without a cache."""

    def __init__(self, hidden: int, inner: int, heads: int, shared: int, device: torch.device | str) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.heads, self.shared, self.dim = heads, shared, hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden, **where), nn.RMSNorm(hidden, **where)
        self.qkv = nn.Linear(hidden, (heads + 2 * shared) * self.dim, bias=False, **where)
        self.out = nn.Linear(hidden, hidden, bias=False, **where)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False, **where)
        self.down = nn.Linear(inner, hidden, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).split([c, self.shared * self.dim, self.shared * self.dim], -1)
        q, k, v = (z.view(b, t, -1, self.dim).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


SIZES = {False: (8192, 28672, 64, 8), True: (256, 512, 8, 2)}


def layer_on(device: torch.device | str, small: bool) -> Layer:
    made = Layer(*SIZES[small], "meta").to_empty(device=device).requires_grad_(False)
    for name, weight in made.named_parameters():
        fresh = torch.ones(weight.shape, device=DEVICE) if "norm" in name else drawn(*weight.shape)
        weight.data.copy_(fresh)
    return made.eval()


def inputs(small: bool) -> dict[str, Tensor]:
    hidden = SIZES[small][0]
    return {"one token": drawn(1, 1, hidden), "prompt of 4096": drawn(1, 32 if small else 4096, hidden)}


def streaming(options: argparse.Namespace) -> None:
    small = options.small
    checked(small)
    began = perf_counter()
    size = sum(p.nbytes for p in Layer(*SIZES[small], "meta").parameters())
    limit = int(options.resident_gib * GIB) if not small else 4 * size
    # Those that will stay are made where they stay: all of them fit neither side.
    away = select_streamed_layers([LayerSizes(size, size, 0)] * options.layers, limit_bytes=limit, num_buffers=2)
    layers = [layer_on("cpu" if i in away else DEVICE, small) for i in range(options.layers)]
    say({"part": "streaming", "layers": len(layers), "layer_bytes": size, "drawn_s": perf_counter() - began})
    for transit in ("as-is", "int4"):
        began = perf_counter()
        streamed = stream_layers(layers, DEVICE, resident_bytes=limit, transit=transit)
        say({"part": "streaming", "transit": transit, "opened_s": perf_counter() - began, "what": str(streamed),
             "streamed_layers": len(streamed.streamed), "sent_as": streamed.sent_as})  # fmt: skip
        for name, x in inputs(small).items():
            with torch.no_grad():
                predicted = streamed.predict(x, seconds=2.0)
            say({"part": "streaming", "transit": transit, "input": name, "prediction": as_dict(predicted)})
            found = streamed.measured(x, seconds=max(3 * predicted.pass_s, 3.0) if not small else 0.2)
            say({"part": "streaming", "transit": transit, "input": name, "measured": as_dict(found)})
        if ON_GPU:
            say({"part": "streaming", "transit": transit, "peak_gib": torch.cuda.max_memory_allocated() / GIB})
        began = perf_counter()
        streamed.undo()
        say({"part": "streaming", "transit": transit, "closed_s": perf_counter() - began})
        del streamed
        settled()


def checked(small: bool) -> None:
    """A short stack as it is: equal; in int4: as far off as its rounded weights are."""
    x = inputs(small)["one token"]
    for transit in ("as-is", "int4"):
        layers = [layer_on(DEVICE, small) for _ in range(4)]
        with torch.no_grad():
            want = x
            for layer in layers:
                want = layer(want)
            limit = int(2.2 * sum(p.nbytes for p in layers[0].parameters()))
            kept = [[p.clone() for p in layer.parameters()] for layer in layers]
            with stream_layers(layers, DEVICE, resident_bytes=limit, transit=transit, ahead=0) as streamed:
                got, again = streamed(x), streamed(x)
                away = streamed.streamed
            if transit == "int4":
                for i in away:
                    for weight in layers[i].parameters():
                        weight.data = rounded_in_transit(weight.data, "int4", group=128)
                want = x
                for layer in layers:
                    want = layer(want)
                for layer, before in zip(layers, kept, strict=True):
                    for weight, old in zip(layer.parameters(), before, strict=True):
                        weight.data = old
        say({"part": "streaming", "checked": transit, "streamed": list(away), "is_equal": torch.equal(got, want),
             "is_repeatable": torch.equal(got, again)})  # fmt: skip
        del layers, kept
        settled()


def accelerate(options: argparse.Namespace) -> None:
    from accelerate import cpu_offload

    small = options.small
    began = perf_counter()
    host = nn.ModuleList(layer_on("cpu", small) for _ in range(2 if small else 8))
    size = sum(p.nbytes for p in host[0].parameters())
    limit = int(options.resident_gib * GIB) if not small else 4 * size
    num_resident = min(limit // size, options.layers)  # as many as fit, without a ring
    num_away = options.layers - num_resident
    cpu_offload(host, execution_device=DEVICE)
    resident = layer_on(DEVICE, small)
    say(
        {
            "part": "accelerate",
            "drawn_s": perf_counter() - began,
            "layers_away": num_away,
            "layers_resident": num_resident,
        }
    )
    for name, x in inputs(small).items():

        def one_pass(x: Tensor = x) -> None:
            with torch.no_grad():
                for i in range(num_away):
                    x = host[i % len(host)](x)
                for _ in range(num_resident):
                    x = resident(x)

        one_pass()
        pass_s = seconds(one_pass, 2)
        ours = {r["transit"]: r["measured"]["pass_s"] for r in RESULTS if r.get("input") == name and "measured" in r}
        say(
            {
                "part": "accelerate",
                "input": name,
                "pass_s": pass_s,
                "times_ours": {t: pass_s / s for t, s in ours.items()},
            }
        )
    settled()


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "kernels": kernels,
    "decode": decode,
    "streaming": streaming,
    "accelerate": accelerate,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--resident-gib", type=float, default=56.0)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    options.layers = options.layers or (6 if options.small else 80)
    torch.manual_seed(0)
    say({"part": "machine", "torch": torch.__version__, "python": platform.python_version(), "small": options.small,
         "device": torch.cuda.get_device_name() if ON_GPU else platform.processor() or "cpu"})  # fmt: skip
    for name in options.parts.split(","):
        if perf_counter() - BEGAN > options.minutes * 60:
            say({"part": name, "skipped": "no time is left"})
            continue
        try:
            PARTS[name](options)
        except Exception as e:  # noqa: BLE001 the other parts go on
            say({"part": name, "error": f"{type(e).__name__}: {str(e)[:800]}", "where": traceback.format_exc()[-1500:]})
        settled()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(json.dumps(r) for r in RESULTS) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
