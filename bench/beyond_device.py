"""Inference beyond the card: layers that do not fit, and tokens one at a time, beside the bounds and beside what people use.

    python bench/beyond_device.py [--out bench/results/<date>-<hardware>/beyond_device.json] [--small]
        [--parts kernels,streaming,accelerate,decode] [--minutes 8] [--resident-gib 40] [--layers 80]

Numerics come first in each part; a part that fails is a line with its error, and the others go on.

- `kernels`    products of one row and of 8 with the weights of a 7 B-shaped model in 4, 8 and 16 bits, each in its fastest way of
               those measured, as a fraction of the device's copy bandwidth; torch's own product beside those of 16 bits
- `streaming`  a 70 B-shaped stack (80 layers of 8192, feed-forward 28672, 64 heads, 8 of keys; 1.7 GB each in bfloat16, random
               weights) with `--resident-gib` of the device: seconds a pass as it is and with int4 in transit, for one token and
               for a prompt, beside max(compute, bytes over the measured link) and the prediction made before. Each streamed layer
               has its own pinned memory. `checked`: a short stack on the same ring, against the layers on the device.
- `accelerate` the same layers, and as many of them on the device, by accelerate.cpu_offload; weights that it keeps on the host
               are shared by layers 8 apart (8 x 1.7 GB, more than any cache holds), since both do not fit the host at once
- `decode`     a 7 B-shaped model (32 layers of 4096, feed-forward 11008, 32 heads, 32000 words), one sequence, `--context` places
               in a static cache: a step compiled and captured, in bfloat16 and int4, plain eager beside it; bytes over the copy
               bandwidth are the bound

Random weights are drawn on the device. With `--small` on any machine, to see that it runs: times then mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.inference.decoding.loop import Decoder, rate_of
from flatout.inference.decoding.static_cache import StaticCache
from flatout.inference.streaming.layers import stream_layers
from flatout.inference.streaming.placing import Sizes, placed
from flatout.inference.streaming.transit import rounded
from flatout.kernels.cached_attention.call import cached_attention
from flatout.kernels.quantised_linear.call import VENDOR, measure, quantised_linear
from flatout.kernels.quantised_linear.packing import Packed, expanded, pack
from flatout.measure import loads
from flatout.measure.timer import clock_for, time_call

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
GIB = 2**30
BEGAN = perf_counter()
RESULTS: list[dict[str, Any]] = []


def say(record: dict[str, Any]) -> None:
    record["at_s"] = round(perf_counter() - BEGAN, 1)
    RESULTS.append(record)
    print(json.dumps(record), flush=True)


def settled() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.synchronize()  # noqa: TID251 between parts
        torch.cuda.empty_cache()


def seconds(call: Callable[[], object], repeats: int, *, inner: int = 1) -> float:
    """The median, of one call after `inner` in a row."""
    clock = clock_for(DEVICE)
    return median(clock.elapsed_s(call, inner) / inner for _ in range(repeats))


def copy_bandwidth(small: bool) -> float:
    load = loads.copy(device=DEVICE, num_bytes=(8 if small else 2048) * loads.MIB)
    return load.work / time_call(load.call, device=DEVICE, max_time_s=1.0).call_s.value


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """On the device, of the size that weights have."""
    return torch.randn(shape, device=DEVICE, dtype=dtype).mul_(shape[-1] ** -0.5)


def of_bits(weight: Tensor, bits: int) -> Packed:
    return Packed(weight, None, 16, 128) if bits == 16 else pack(weight, bits=bits)


# -- kernels -----------------------------------------------------------------------------------------------------------------


SHAPES = ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096))


def kernels(options: argparse.Namespace) -> None:
    """All products of a step with one row in 4 and 16 bits; the largest in 8 bits, and with 8 rows."""
    bandwidth = copy_bandwidth(options.small)
    shapes = ((256, 128),) if options.small else SHAPES
    for bits in (4, 16):
        rows = [one_product(options, bits, 1, n, k, bandwidth) for n, k in shapes]
        times = [1 if row["n"] == 32000 else 32 for row in rows]
        total_s = sum(row["us"] * num for row, num in zip(rows, times, strict=True)) / 1e6
        total_bytes = sum(row["bytes"] * num for row, num in zip(rows, times, strict=True))
        vendor_s = sum((row["vendor_us"] or 0) * num for row, num in zip(rows, times, strict=True)) / 1e6
        say({"part": "kernels", "bits": bits, "rows": 1, "model": "all products of a step", "ms": total_s * 1e3,
             "bytes": total_bytes, "fraction_of_copy": total_bytes / total_s / bandwidth,
             "vendor_ms": vendor_s * 1e3 or None, "copy_bytes_per_s": bandwidth})  # fmt: skip
    for bits, rows_at_once in ((8, 1), (4, 8), (8, 8), (16, 8)):
        one_product(options, bits, rows_at_once, *shapes[min(2, len(shapes) - 1)], bandwidth)


def one_product(options: argparse.Namespace, bits: int, rows: int, n: int, k: int, bandwidth: float) -> dict[str, Any]:
    packed = of_bits(drawn(n, k), bits)
    if ON_GPU:
        times = measure(packed, rows=rows, dtype=torch.bfloat16, seconds=1.0)
        check(packed, rows, k)
    else:
        times = {"reference": seconds(lambda: quantised_linear(drawn(rows, k), packed), 3)}
    way, best = next(iter(times.items()))
    moved = packed.num_bytes + rows * (n + k) * 2
    row = {"part": "kernels", "bits": bits, "rows": rows, "n": n, "k": k, "way": way, "us": best * 1e6, "bytes": moved,
           "fraction_of_copy": moved / best / bandwidth, "vendor_us": times.get(VENDOR, 0) * 1e6 or None,
           "others": {name: round(s * 1e6, 2) for name, s in [*times.items()][1:]}}  # fmt: skip
    say(row)
    settled()
    return row


def check(packed: Packed, rows: int, k: int) -> None:
    x = drawn(rows, k)
    scales = None if packed.scales is None else packed.scales.double()
    wide = expanded(packed.codes, scales, bits=packed.bits, dtype=torch.float64)
    exact = x.double() @ wide.T
    with torch.no_grad():
        error = float((quantised_linear(x, packed).double() - exact).norm() / exact.norm())
    assert error < 4e-3, f"a product's error is {error}"  # bfloat16 rounds by 2**-9 at most, 2e-3


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
    away = placed([Sizes(size, size, 0)] * options.layers, limit_bytes=limit, slots=2)
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


def as_dict(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


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
                        weight.data = rounded(weight.data, "int4", group=128)
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


# -- one token at a time -----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A 7 B-shaped Llama whose weights are `Packed`, in 16 bits or 4, or plain (`kind` "plain": F.linear)."""

    def __init__(self, small: bool, kind: str, context: int) -> None:
        super().__init__()
        self.hidden, self.inner, self.heads, self.num, self.words = (
            (256, 512, 4, 2, 512) if small else (4096, 11008, 32, 32, 32000)
        )
        self.dim, bits = self.hidden // self.heads, 4 if kind == "int4" else 16
        self.is_plain = kind == "plain"
        self.weights: list[tuple[Packed, ...]] = []
        sizes = (
            (3 * self.hidden, self.hidden),
            (self.hidden, self.hidden),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        )
        for _ in range(self.num):
            self.weights.append(tuple(of_bits(drawn(n, k), bits) for n, k in sizes))
        self.head = of_bits(drawn(self.words, self.hidden), bits)
        self.embedding = drawn(self.words, self.hidden)
        self.norms = torch.ones(2 * self.num + 1, self.hidden, device=DEVICE, dtype=torch.bfloat16)
        self.rates = 1e4 ** -(torch.arange(0, self.dim, 2, device=DEVICE) / self.dim)
        self.cache = StaticCache(self.num, 1, self.heads, context, self.dim, device=DEVICE)

    @property
    def weight_bytes(self) -> int:
        return sum(w.num_bytes for layer in self.weights for w in layer) + self.head.num_bytes + self.norms.nbytes

    def forward(self, token: Tensor) -> Tensor:
        """[1] -> [1], the likeliest; the cache is written at its position."""
        x = F.embedding(token, self.embedding)
        angles = self.cache.places() * self.rates
        cos, sin, at, n = angles.cos(), angles.sin(), self.cache.position, self.norms
        for i, weights in enumerate(self.weights):
            x = self.block(x, n[2 * i], n[2 * i + 1], weights, self.cache.keys[i], self.cache.values[i], at, cos, sin)
        return self.block_end(x, n[-1])

    def block_end(self, x: Tensor, norm: Tensor) -> Tensor:
        return product(F.rms_norm(x, norm.shape, norm, 1e-5), self.head, self.is_plain).argmax(-1)

    def compiled(self) -> Model:
        """The layer compiled once for all layers, which differ in their tensors alone."""
        self.block = torch.compile(self.block, fullgraph=True)
        return self

    def block(
        self, x: Tensor, norm1: Tensor, norm2: Tensor, weights: tuple[Packed, ...], keys: Tensor, values: Tensor,
        at: Tensor, cos: Tensor, sin: Tensor,
    ) -> Tensor:  # fmt: skip
        qkv, out, gate_up, down = weights
        plain = self.is_plain
        y = F.rms_norm(x, norm1.shape, norm1, 1e-5)
        q, k, v = product(y, qkv, plain).view(3, 1, self.heads, 1, self.dim).unbind(0)
        keys.index_copy_(2, at, turned(k, cos, sin))
        values.index_copy_(2, at, v)
        q = turned(q, cos, sin)
        if plain:
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.cache.mask())
        else:
            y = cached_attention(q, keys, values, at)
        x = x + product(y.view(1, self.hidden), out, plain)
        gate, up = product(F.rms_norm(x, norm2.shape, norm2, 1e-5), gate_up, plain).chunk(2, -1)
        return x + product(F.silu(gate) * up, down, plain)


def product(x: Tensor, weight: Packed, plain: bool) -> Tensor:
    return F.linear(x, weight.codes) if plain else quantised_linear(x, weight)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def decode(options: argparse.Namespace) -> None:
    small, context = options.small, 64 if options.small else options.context
    bandwidth = copy_bandwidth(small)
    num, length = (8, 32) if small else (64, context - 80)
    for kind in ("plain", "bf16", "int4"):
        torch.manual_seed(0)
        with torch.no_grad():
            decode_kind(Model(small, kind, context), kind, num, length, bandwidth)
        settled()


def decode_kind(model: Model, kind: str, num: int, length: int, bandwidth: float) -> None:
    model.cache.position.fill_(length)
    for t in (*model.cache.keys, *model.cache.values):
        t.normal_()
    token = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    # Keys and values up to the position are read, by plain attention those of all places.
    context = model.cache.max_len
    cache_bytes = model.cache.num_bytes * (context if kind == "plain" else length + num // 2) // context
    report(kind, "eager", seconds(lambda: model(token), 3, inner=3), model, cache_bytes, bandwidth)
    if kind == "plain":
        return
    first, plain = token, []
    for _ in range(num):
        first = model(first)
        model.cache.advance()
        plain.append(int(first))
    said = []
    for is_compiled in (False, True):
        began = perf_counter()
        decoder = Decoder(model.compiled() if is_compiled else model, model.cache, batch=1)
        said.append(decoder(token, num=num, length=length)[0].tolist())
        made_s = perf_counter() - began
        step_s = seconds(lambda decoder=decoder: decoder(token, num=num, length=length), 5) / num  # type: ignore[misc]
        how = ("graph" if decoder.graphed.is_captured else "no graph") + (", compiled" if is_compiled else "")
        report(kind, how, step_s, model, cache_bytes, bandwidth, made_s=made_s)
    equal = sum(a == b for a, b in zip(said[1], plain, strict=True)) / num
    say(
        {"part": "decode", "kind": kind, "graph_says_what_eager_says": said[0] == plain, "compiled_tokens_equal": equal}
    )


def report(kind: str, how: str, step_s: float, model: Model, cache_bytes: int, bandwidth: float, **more: Any) -> None:
    rate = rate_of(
        step_s, batch=1, weight_bytes=model.weight_bytes, cache_bytes=cache_bytes, bandwidth_bytes_per_s=bandwidth
    )
    say({"part": "decode", "kind": kind, "how": how, **as_dict(rate), **more})


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
