"""The parts `kernels` and `decode` of `beyond_device.py`: see there."""

from __future__ import annotations

import argparse
import traceback
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from beyond_machine import DEVICE, ON_GPU, copy_bandwidth, drawn, say, seconds, settled
from torch import Tensor, nn

from flatout.blocks.inference.decoding.cuda_graph import Graphed
from flatout.blocks.inference.decoding.loop import Decoder
from flatout.blocks.inference.decoding.static_cache import StaticCache
from flatout.blocks.kernels.cached_attention.call import cached_attention
from flatout.blocks.kernels.cached_attention.rope import reference_rope_decode_attention as attention_reference
from flatout.blocks.kernels.cached_attention.rope import rope_decode_attention, rotate_halves
from flatout.blocks.kernels.decode_megakernel.megakernel import DecodeMegakernel
from flatout.blocks.kernels.quantised_linear.call import VENDOR, measure_quantised_linear, quantised_linear
from flatout.blocks.kernels.quantised_linear.mma import measure_cuts, packed_linear
from flatout.blocks.kernels.quantised_linear.mma_packing import MmaPackedWeight, pack_for_mma
from flatout.blocks.kernels.quantised_linear.packing import PackedWeight, expanded, pack_weight

EPS = 1e-5
SHAPES = ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096))
NORMED, GATED = (12288, 22016, 32000), 22016
MEASURED: set[tuple[int, int, int]] = set()


def of_bits(weight: Tensor, bits: int) -> PackedWeight:
    return PackedWeight(weight, None, 16, 128) if bits == 16 else pack_weight(weight, bits=bits)


def tried(part: str, what: str, call: Callable[[], Any]) -> Any:
    """What it gives; a failure is said, and None."""
    try:
        return call()
    except Exception as e:  # noqa: BLE001 the others go on
        told = f"{type(e).__name__}: {str(e)[:700]}"
        say({"part": part, "what": what, "error": told, "where": traceback.format_exc()[-900:]})
        return None


# -- kernels -----------------------------------------------------------------------------------------------------------------


def kernels(options: argparse.Namespace) -> None:
    """All products of a step with one row in 4 and 16 bits; the largest in 8 bits, and with 8 rows."""
    bandwidth = copy_bandwidth(options.small)
    shapes = ((256, 128),) if options.small else SHAPES
    for bits in (4, 16):
        if ON_GPU:
            step_of([one_packed(bits, 1, n, k, bandwidth) for n, k in shapes], bits, "packed", bandwidth)
        step_of([one_product(bits, 1, n, k, bandwidth) for n, k in shapes], bits, "packed", bandwidth)
    for bits, rows_at_once in ((8, 1), (4, 8), (8, 8), (16, 8)):
        one_product(bits, rows_at_once, *shapes[min(2, len(shapes) - 1)], bandwidth)
    if ON_GPU:
        for bits in (4, 16):
            one_packed(bits, 8, *shapes[min(2, len(shapes) - 1)], bandwidth)


def step_of(rows: list[dict[str, Any] | None], bits: int, lies: str, bandwidth: float) -> None:
    """The products of 32 layers and of the head."""
    if any(row is None or "us" not in row for row in rows):
        return
    times = [1 if row["n"] == 32000 else 32 for row in rows]  # type: ignore[index]

    def total(name: str) -> float:
        return sum((row[name] or 0) * num for row, num in zip(rows, times, strict=True))  # type: ignore[index]

    say({"part": "kernels", "layout": lies, "bits": bits, "rows": 1, "model": "all products of a step", "ms": total("us") / 1e3,
         "bytes": total("bytes"), "fraction_of_copy": total("bytes") / (total("us") / 1e6) / bandwidth,
         "vendor_ms": total("vendor_us") / 1e3 or None, "copy_bytes_per_s": bandwidth})  # fmt: skip


def one_packed(bits: int, rows: int, n: int, k: int, bandwidth: float) -> dict[str, Any] | None:
    """In the form in which a layer has it."""
    weight = pack_for_mma(of_bits(drawn(n, k), bits), is_gated=n == GATED)
    times = tried("kernels", f"packed {bits} bits {n}x{k}", lambda: measured(weight, rows))
    if times is None:
        return None
    (cut, best), *others = times.items()
    moved = weight.num_bytes + rows * (n + k) * 2
    row = {"part": "kernels", "layout": "packed",
           "bits": bits, "rows": rows, "n": n, "k": k, "variant": str(cut), "us": best * 1e6,
           "bytes": moved, "fraction_of_copy": moved / best / bandwidth, "vendor_us": None,
           "others": {str(name): round(s * 1e6, 2) for name, s in others}}  # fmt: skip
    say(row)
    settled()
    return row


def measured(weight: MmaPackedWeight, rows: int) -> dict[Any, float]:
    if rows == 1:
        MEASURED.add((weight.outputs, weight.inputs, weight.bits))
    return measure_cuts(weight, rows=rows, has_norm=weight.outputs in NORMED, seconds=0.5)


def one_product(bits: int, rows: int, n: int, k: int, bandwidth: float) -> dict[str, Any]:
    packed = of_bits(drawn(n, k), bits)
    if ON_GPU:
        times = measure_quantised_linear(packed, rows=rows, dtype=torch.bfloat16, seconds=0.5)
        check(packed, rows, k)
    else:
        times = {"reference": seconds(lambda: quantised_linear(drawn(rows, k), packed), 3)}
    variant, best = next(iter(times.items()))
    moved = packed.num_bytes + rows * (n + k) * 2
    row = {"part": "kernels", "layout": "packed",
           "bits": bits, "rows": rows, "n": n, "k": k, "variant": variant, "us": best * 1e6,
           "bytes": moved, "fraction_of_copy": moved / best / bandwidth, "vendor_us": times.get(VENDOR, 0) * 1e6 or None,
           "others": {name: round(s * 1e6, 2) for name, s in [*times.items()][1:4]}}  # fmt: skip
    say(row)
    settled()
    return row


def check(packed: PackedWeight, rows: int, k: int) -> None:
    x = drawn(rows, k)
    exact = x.double() @ wide(packed).T
    with torch.no_grad():
        error = float((quantised_linear(x, packed).double() - exact).norm() / exact.norm())
    assert error < 4e-3, f"a product's error is {error}"  # bfloat16 rounds by 2**-9 at most, 2e-3


def wide(packed: PackedWeight) -> Tensor:
    scales = None if packed.scales is None else packed.scales.double()
    return expanded(packed.codes, scales, bits=packed.bits, dtype=torch.float64)


# -- one token at a time -----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A 7 B-shaped Llama whose weights are `PackedWeight`, in 16 bits or 4, or plain (`kind` "plain": F.linear)."""

    def __init__(self, small: bool, kind: str, context: int) -> None:
        super().__init__()
        self.hidden, self.inner, self.heads, self.num, self.words = (
            (256, 512, 2, 2, 512) if small else (4096, 11008, 32, 32, 32000)
        )
        self.dim, bits = self.hidden // self.heads, 4 if kind == "int4" else 16
        self.is_plain = kind == "plain"
        sizes = ((3 * self.hidden, self.hidden), (self.hidden, self.hidden), (2 * self.inner, self.hidden),
                 (self.hidden, self.inner))  # fmt: skip
        self.weights = [tuple(of_bits(drawn(n, k), bits) for n, k in sizes) for _ in range(self.num)]
        self.head = of_bits(drawn(self.words, self.hidden), bits)
        self.embedding = drawn(self.words, self.hidden)
        self.norms = torch.ones(2 * self.num + 1, self.hidden, device=DEVICE, dtype=torch.bfloat16)
        rates = 1e4 ** -(torch.arange(0, self.dim, 2, device=DEVICE) / self.dim)
        angles = torch.arange(context, device=DEVICE)[:, None] * rates
        self.cosines, self.sines = angles.cos(), angles.sin()
        self.cache = StaticCache(self.num, 1, self.heads, context, self.dim, device=DEVICE)

    @property
    def weight_bytes(self) -> int:
        return sum(w.num_bytes for layer in self.weights for w in layer) + self.head.num_bytes + self.norms.nbytes

    def forward(self, token: Tensor) -> Tensor:
        """[1] -> [1], the likeliest; the cache is written at its position."""
        return self.logits(token).argmax(-1)

    def logits(self, token: Tensor) -> Tensor:
        x = F.embedding(token, self.embedding)
        at, n = self.cache.position, self.norms
        cos, sin = self.cosines.index_select(0, at), self.sines.index_select(0, at)
        for i, weights in enumerate(self.weights):
            x = self.block(x, n[2 * i], n[2 * i + 1], weights, self.cache.keys[i], self.cache.values[i], at, cos, sin)
        return product(F.rms_norm(x, n[-1].shape, n[-1], EPS), self.head, self.is_plain)

    def compiled(self) -> Model:
        """The layer compiled once for all layers, which differ in their tensors alone."""
        self.block = torch.compile(self.block, fullgraph=True)
        return self

    def block(
        self, x: Tensor, norm1: Tensor, norm2: Tensor, weights: tuple[PackedWeight, ...], keys: Tensor, values: Tensor,
        at: Tensor, cos: Tensor, sin: Tensor,
    ) -> Tensor:  # fmt: skip
        qkv, out, gate_up, down = weights
        plain = self.is_plain
        y = F.rms_norm(x, norm1.shape, norm1, EPS)
        q, k, v = product(y, qkv, plain).view(3, 1, self.heads, 1, self.dim).unbind(0)
        keys.index_copy_(2, at, rotate_halves(k, cos, sin))
        values.index_copy_(2, at, v)
        q = rotate_halves(q, cos, sin)
        if plain:
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.cache.mask())
        else:
            y = cached_attention(q, keys, values, at)
        x = x + product(y.view(1, self.hidden), out, plain)
        gate, up = product(F.rms_norm(x, norm2.shape, norm2, EPS), gate_up, plain).chunk(2, -1)
        return x + product(F.silu(gate) * up, down, plain)


def product(x: Tensor, weight: PackedWeight, plain: bool) -> Tensor:
    return F.linear(x, weight.codes) if plain else quantised_linear(x, weight)


class PackedModel(nn.Module):
    """The same model, weights and cache; a layer is five kernels."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.cache = model, model.cache
        self.layers = [tuple(pack_for_mma(w, is_gated=i == 2) for i, w in enumerate(layer)) for layer in model.weights]
        self.head = pack_for_mma(model.head)
        self.weight_bytes = model.weight_bytes

    def forward(self, token: Tensor) -> Tensor:
        return self.logits(token).argmax(-1)

    def logits(self, token: Tensor) -> Tensor:
        model, cache = self.model, self.cache
        x = F.embedding(token, model.embedding)
        for i, (qkv, out, gate_up, down) in enumerate(self.layers):
            fresh = packed_linear(x, qkv, norm=model.norms[2 * i], eps=EPS)
            y = rope_decode_attention(fresh, model.cosines, model.sines, cache.keys[i], cache.values[i], cache.position)
            x = packed_linear(y, out, residual=x)
            y = packed_linear(x, gate_up, norm=model.norms[2 * i + 1], eps=EPS)
            x = packed_linear(y, down, residual=x)
        return packed_linear(x, self.head, norm=model.norms[-1], eps=EPS)


class MegakernelModel(nn.Module):
    """The same model, weights and cache once more; all layers and the head are one launch."""

    def __init__(self, packed: PackedModel) -> None:
        super().__init__()
        model = packed.model
        self.model, self.cache, self.weight_bytes = model, packed.cache, packed.weight_bytes
        self.megakernel = DecodeMegakernel(rows=1, width=model.hidden, cosines_SH2=model.cosines, sines_SH2=model.sines)
        megakernel, cache, h = self.megakernel, self.cache, self.megakernel.input
        for i, (qkv, out, gate_up, down) in enumerate(packed.layers):
            fresh = megakernel.product(h, qkv, norm=model.norms[2 * i], eps=EPS)
            y = megakernel.attention(fresh, cache.keys[i], cache.values[i])
            h = megakernel.product(y, out, residual=h)
            y = megakernel.product(h, gate_up, norm=model.norms[2 * i + 1], eps=EPS)
            h = megakernel.product(y, down, residual=h)
        megakernel.product(h, packed.head, norm=model.norms[-1], eps=EPS)

    def forward(self, token: Tensor) -> Tensor:
        return self.megakernel(F.embedding(token, self.model.embedding), self.cache.position).argmax(-1)

    def logits(self, token: Tensor) -> Tensor:
        """A copy: the next call overwrites the megakernel's own."""
        return self.megakernel(F.embedding(token, self.model.embedding), self.cache.position).clone()


def decode(options: argparse.Namespace) -> None:
    small, context = options.small, 64 if options.small else options.context
    bandwidth = copy_bandwidth(small)
    num, length = (8, 32) if small else (64, context - 80)
    for kind in ("plain", "bf16", "int4"):
        torch.manual_seed(0)
        with torch.no_grad():
            tried("decode", kind, lambda kind=kind: decode_kind(small, kind, context, num, length, bandwidth))  # type: ignore[misc]
        settled()


def decode_kind(small: bool, kind: str, context: int, num: int, length: int, bandwidth: float) -> None:
    model = Model(small, kind, context)
    model.cache.position.fill_(length)
    for t in (*model.cache.keys, *model.cache.values):
        t.normal_()
    token = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    # Keys and values up to the position are read, by plain attention those of all places.
    cache_bytes = model.cache.num_bytes * (context if kind == "plain" else length + num // 2) // context
    report(kind, "eager", seconds(lambda: model(token), 3, inner=3), model, cache_bytes, bandwidth)
    if kind == "plain":
        return
    exact = exact_logits(model, length)
    say({"part": "decode", "kind": kind, "how": "eager", **off_by(given(model.logits, model.cache, length), exact)})
    bits = 4 if kind == "int4" else 16
    makers: list[tuple[str, Callable[[], Model | PackedModel | MegakernelModel]]] = [
        ("megakernel", lambda: MegakernelModel(PackedModel(model))),
        ("packed", lambda: packed_model_of(model, bits)),
        ("as it is", lambda: model),
        ("compiled", model.compiled),
    ]
    for how, made in makers:
        tried("decode", f"{kind}, {how}", lambda how=how, made=made: decoded(  # type: ignore[misc]
            made(), kind, how, exact, token, num, length, cache_bytes, bandwidth))  # fmt: skip
        settled()


def packed_model_of(model: Model, bits: int) -> PackedModel:
    if ON_GPU:
        for n, k in SHAPES:
            if (n, k, bits) not in MEASURED and model.hidden == 4096:
                measured(pack_for_mma(of_bits(drawn(n, k), bits), is_gated=n == GATED), 1)
    return PackedModel(model)


def decoded(
    model: Model | PackedModel | MegakernelModel, kind: str, how: str, exact: Tensor, token: Tensor, num: int, length: int,
    cache_bytes: int, bandwidth: float,
) -> None:  # fmt: skip
    """Numbers first, operator by operator and captured; then times."""
    cache = model.cache
    plain = given(model.logits, cache, length)
    cache.position.fill_(length)
    graphed = Graphed(model.logits, (token,), state=cache.state)
    replayed = given(lambda t: graphed(t).clone(), cache, length)
    say(
        {
            "part": "decode",
            "kind": kind,
            "how": how,
            "graph_equals_plain": torch.equal(replayed, plain),
            **off_by(replayed, exact),
        }
    )
    cache.position.fill_(length)
    first, tokens = token, []
    for _ in range(num):
        first = model(first)
        cache.advance()
        tokens.append(first)
    wanted = torch.cat(tokens).tolist()
    began = perf_counter()
    decoder = Decoder(model, cache, batch=1)
    said = [decoder(token, num=num, length=length)[0].tolist() for _ in range(3)]
    made_s = perf_counter() - began
    step_s = seconds(lambda: decoder(token, num=num, length=length), 7) / num
    report(kind, f"graph, {how}" if decoder.graphed.is_captured else f"no graph, {how}", step_s, model, cache_bytes, bandwidth,
           made_s=made_s, says_what_plain_says=[s == wanted for s in said])  # fmt: skip
    if ON_GPU:
        marginal = tried("decode", "profile", lambda: marginal_us(lambda: decoder(token, num=4, length=length), 4))
        say({"part": "decode", "kind": kind, "how": how, "marginal_us": marginal})


def given(logits: Callable[[Tensor], Tensor], cache: StaticCache, length: int) -> Tensor:
    """[T, words]: logits of tokens that are the same for everybody."""
    cache.position.fill_(length)
    made = []
    for word in WORDS:
        made.append(logits(torch.full((1,), word, dtype=torch.int64, device=DEVICE)))
        cache.advance()
    cache.position.fill_(length)
    return torch.cat(made)


WORDS = (0, 17, 301, 42)


def exact_logits(model: Model, length: int) -> Tensor:
    """In float64, each weight widened when it is used."""
    at, n = torch.full((1,), length, device=DEVICE), model.norms.double()
    cos, sin = model.cosines.double(), model.sines.double()
    keys, values = ([t.double() for t in kept] for kept in (model.cache.keys, model.cache.values))
    made = []
    for word in WORDS:
        x = model.embedding[word][None].double()
        for i, (qkv, out, gate_up, down) in enumerate(model.weights):
            y = F.rms_norm(x, n[2 * i].shape, n[2 * i], EPS)
            x = x + attention_reference(y @ wide(qkv).T, cos, sin, keys[i], values[i], at) @ wide(out).T
            gate, up = (F.rms_norm(x, n[2 * i + 1].shape, n[2 * i + 1], EPS) @ wide(gate_up).T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ wide(down).T
        made.append(F.rms_norm(x, n[-1].shape, n[-1], EPS) @ wide(model.head).T)
        at += 1
    settled()
    return torch.cat(made)


def off_by(logits: Tensor, exact: Tensor) -> dict[str, Any]:
    """The norm of the difference over that of what is exact, and how many of the likeliest words are the same."""
    errors = (logits.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    same = int((logits.argmax(-1) == exact.argmax(-1)).sum())
    return {"logits_off_by": [round(float(e), 5) for e in errors], "same_word": f"{same} of {len(WORDS)}"}


def marginal_us(call: Callable[[], object], steps: int) -> dict[str, float]:
    """Microseconds a step by kernel: how much later it ends than all before it. Kernels overlap, so durations would not add up.
    Those of the same name are told apart by how many have run since another."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()  # noqa: TID251 what is profiled must have ended
    events = [(e.start_ns() + e.duration_ns(), e.name()) for e in profile.profiler.kineto_results.events()
              if e.device_type() == torch.autograd.DeviceType.CUDA]  # fmt: skip
    found: dict[str, float] = defaultdict(float)
    last_ns, last, run = None, "", 0
    for end_ns, name in sorted(events):
        run = run + 1 if name == last else 1
        last = name
        if last_ns is not None:
            found[f"{name[:60]} {run}"] += (end_ns - last_ns) / 1e3 / steps
        last_ns = end_ns
    return {name: round(us, 1) for name, us in sorted(found.items(), key=lambda pair: -pair[1])[:16]}


def report(
    kind: str,
    how: str,
    step_s: float,
    model: Model | PackedModel | MegakernelModel,
    cache_bytes: int,
    bandwidth: float,
    **more: Any,
) -> None:
    """A measured step beside its bound: weights and cache read once at the device's bandwidth of a copy."""
    bound_s = (model.weight_bytes + cache_bytes) / bandwidth
    rate = {
        "tokens_per_s": 1 / step_s,
        "step_s": step_s,
        "weight_bytes": model.weight_bytes,
        "cache_bytes": cache_bytes,
        "bandwidth_bytes_per_s": bandwidth,
        "bound_s": bound_s,
        "bound_fraction": bound_s / step_s,
    }
    say({"part": "decode", "kind": kind, "how": how, **rate, **more})
