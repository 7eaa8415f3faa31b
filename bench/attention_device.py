"""Attention on a GPU: ours beside cuDNN, FlashAttention and FlexAttention, in one run, forward and backward.

    python bench/attention_device.py [--out FILE] [--only PART,...] [--small]

Parts: causal, documents (new lengths every step, building the mask included), packed (rows of documents whose numbers are given
token by token, new every step, as a Llama with 32 heads of width 64 has them; beside ours the same from a dense mask, cuDNN's
kernel for documents and FlexAttention),
window, softcap, irregular (a tree and a graph at 64 k tokens, and what create_block_mask takes for them), lengths
(recompilations over 100 sets of documents). Every variant is compared with float64; times are between events on the device, of
stretches of 8 calls, in rounds in which variants take turns, on random inputs; ratios with their interval are of those rounds.
Results are written as they come. With --small on any machine, to see that it runs: what needs a GPU says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flatout
from flatout import masks, scores
from flatout.blocks.kernels.attention.api import attention_selection
from flatout.blocks.kernels.attention.cudnn_varlen import cudnn_backward, cudnn_forward
from flatout.blocks.kernels.attention.dense_masks import attention_by_dense_mask
from flatout.blocks.kernels.attention.flash_varlen import flash_backward, flash_forward
from flatout.blocks.kernels.attention.mask import Mask
from flatout.blocks.kernels.attention.spans import SpanOptions, Spans, attend_on_tokens
from flatout.machine.measure.stats import ratio_estimate

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
STRETCH = 8


class Sizes(NamedTuple):
    tokens: int
    heads: int
    width: int
    rounds: int


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor


class Record:
    """Results, on disk after each."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }

    def add(self, part: str, what: dict[str, Any]) -> None:
        self.found[part] = what
        print(f"{part}: {json.dumps(what, indent=1)}", flush=True)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.found, indent=1) + "\n")


def drawn(batch: int, length: int, sizes: Sizes) -> Inputs:
    shape = (batch, length, sizes.heads, sizes.width)
    made = [torch.randn(shape, device=DEVICE, dtype=DTYPE).transpose(1, 2) for _ in range(4)]
    return Inputs(*(t.requires_grad_() for t in made[:3]), made[3])


def gradients(out: Tensor, given: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, list(given[:3]), given.grad)


def seconds(work: Callable[[], Any]) -> float:
    if not ON_GPU:
        began_s = perf_counter()
        work()
        return perf_counter() - began_s
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def off(attend: Attend, given: Inputs, seen: Callable[[int], Tensor], cap: float | None = None) -> list[float]:
    """Result and gradients against float64, sample by sample and head by head; `seen` (S, S) of a sample."""
    out = attend(*given[:3])
    found = [out, *gradients(out, given)]
    wrong, size = [0.0] * 4, [0.0] * 4
    for b in range(out.size(0)):
        for h in range(out.size(1)):
            q, k, v = (t[b, h].detach().double().requires_grad_() for t in given[:3])
            raw = q @ k.T * q.size(-1) ** -0.5
            raw = raw if cap is None else cap * torch.tanh(raw / cap)
            exact = raw.masked_fill(~seen(b), -torch.inf).softmax(-1) @ v
            for at, e in enumerate([exact, *torch.autograd.grad(exact, [q, k, v], given.grad[b, h].double())]):
                wrong[at] += (found[at][b, h].double() - e).square().sum().item()
                size[at] += e.square().sum().item()
    return [(w / s) ** 0.5 for w, s in zip(wrong, size, strict=True)]


def raced(variants: dict[str, Attend], given: Inputs, rounds: int, flop: float) -> dict[str, Any]:
    """Forward, backward and both, in rounds of stretches; ratios of every other variant's time to that of 'ours'.

    A stretch begins while the device is busy with one more of the same, as in the middle of a loop, so that what the host does
    counts as far as the device has to wait for it.
    """
    times: dict[str, dict[str, list[float]]] = {}
    failed: dict[str, str] = {}
    for name, attend in variants.items():
        try:
            for _ in range(3):
                gradients(attend(*given[:3]), given)
            times[name] = {"forward": [], "backward": [], "both": []}
        except Exception as error:  # noqa: BLE001 -- a peer that does not run is a result
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    for _ in range(rounds):
        for name, spent in times.items():
            attend = variants[name]
            spent["forward"].append(stretch(lambda attend=attend: attend(*given[:3])))
            outs = [attend(*given[:3]) for _ in range(STRETCH + 1)]
            spent["backward"].append(stretch(lambda outs=outs: gradients(outs.pop(), given)))
            spent["both"].append(stretch(lambda attend=attend: gradients(attend(*given[:3]), given)))
    result: dict[str, Any] = {"failed": failed} if failed else {}
    for name, spent in times.items():
        entry: dict[str, Any] = {f"{way}_ms": median(spent[way]) * 1e3 for way in spent}
        entry["tflop_per_s"] = [flop / median(spent["forward"]) / 1e12, 2.5 * flop / median(spent["backward"]) / 1e12]
        if name != "ours" and "ours" in times:
            for way in spent:
                ratio = ratio_estimate(spent[way], times["ours"][way])
                entry[f"ours_is_faster_{way}"] = [ratio.value, ratio.low, ratio.high]
        result[name] = entry
    return result


def stretch(work: Callable[[], Any]) -> float:
    """Seconds of one `work` out of STRETCH in a row."""
    work()

    def many() -> None:
        for _ in range(STRETCH):
            work()

    return seconds(many) / STRETCH


def sdpa(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def flex(mask: Mask, length: int, score_mod: Any = None) -> Attend:
    """FlexAttention as its tutorial has it."""
    mod = mask.to(DEVICE).mod()
    block_mask = create_block_mask(mod, None, None, length, length, device=DEVICE)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=block_mask)


def causal_pairs(lengths: Tensor) -> float:
    return float((lengths.double() * (lengths.double() + 1) / 2).sum())


def causal(sizes: Sizes, record: Record) -> None:
    for length in (sizes.tokens // 4, sizes.tokens):
        given = drawn(sizes.tokens // length, length, sizes)
        mask = masks.causal()
        variants: dict[str, Attend] = {"ours": lambda q, k, v, m=mask: flatout.attention(q, k, v, mask=m)}
        if ON_GPU:
            variants["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
            variants["flash"] = sdpa(SDPBackend.FLASH_ATTENTION)
            variants["flex"] = flex(mask, length)
        flop = 4 * sizes.heads * sizes.width * given.q.size(0) * causal_pairs(torch.tensor([length]))
        what = raced(variants, given, sizes.rounds, flop)
        if length < sizes.tokens:
            seen = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
            what["off"] = off(variants["ours"], given, lambda b, seen=seen: seen)
        record.add(f"causal {length}", what)


def window(sizes: Sizes, record: Record) -> None:
    for length in (sizes.tokens // 4, sizes.tokens):
        wide = length // 4 if not ON_GPU else 1024
        given, mask = drawn(sizes.tokens // length, length, sizes), masks.window(wide - 1)
        variants: dict[str, Attend] = {"ours": lambda q, k, v, m=mask: flatout.attention(q, k, v, mask=m)}
        if ON_GPU:
            variants["flex"] = flex(mask, length)
            variants["flash"] = flash(torch.arange(0, sizes.tokens + 1, length), window=(wide - 1, 0))
        flop = 4 * sizes.heads * sizes.width * given.q.size(0) * (wide * length - wide * (wide - 1) / 2)
        what = raced(variants, given, sizes.rounds, flop)
        if length < sizes.tokens:
            seen = mask.dense(length, length, DEVICE)[0, 0]
            what["off"] = off(variants["ours"], given, lambda b, seen=seen: seen)
        what["kernel"] = str(attention_selection(*given[:3], mask=mask))
        record.add(f"window {wide} of {length}", what)


def capped(mask: Mask, score: scores.Score) -> Attend:
    return lambda q, k, v: flatout.attention(q, k, v, mask=mask, score=score)


def softcap(sizes: Sizes, record: Record) -> None:
    cap = 20.0
    for length in (sizes.tokens // 4, sizes.tokens):
        given, mask = drawn(sizes.tokens // length, length, sizes), masks.causal()
        forms = {form: capped(mask, scores.softcap(cap, form=form)) for form in ("exact", "sigmoid", "hardware")}
        variants = {"ours": forms["hardware"], "ours, exact": forms["exact"], "ours, sigmoid": forms["sigmoid"]}
        if ON_GPU:
            variants["flex"] = flex(mask, length, lambda score, b, h, q, kv: cap * torch.tanh(score / cap))
        flop = 4 * sizes.heads * sizes.width * given.q.size(0) * causal_pairs(torch.tensor([length]))
        what = raced(variants, given, sizes.rounds, flop)
        if length < sizes.tokens:
            seen = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
            what["off"] = {form: off(attend, given, lambda b, seen=seen: seen, cap) for form, attend in forms.items()}
        record.add(f"softcap {length}", what)


def offsets_drawn(tokens: int, num: int, generator: torch.Generator) -> Tensor:
    cuts = torch.randperm(tokens - 1, generator=generator)[: num - 1].sort().values + 1
    return torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), tokens)])


def flash(
    offsets: Tensor, window: tuple[int, int] | None = None, *, kernel: Any = (flash_forward, flash_backward)
) -> Attend:
    """torch's variable-length kernel, called as torch's own wrapper calls it; or another that takes the same."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spans = Spans(offsets.to(torch.int32).pin_memory().to(DEVICE, non_blocking=True), int(offsets.diff().max()))
        batch, _, length, _ = q.shape
        rows = [t.transpose(1, 2).reshape(batch * length, t.size(1), t.size(3)) for t in (q, k, v)]
        left, right = (None, 0) if window is None else window
        out = attend_on_tokens(*rows, SpanOptions(spans, left, right, q.size(-1) ** -0.5), *kernel)
        return out.view(batch, length, *out.shape[1:]).transpose(1, 2)

    return attend


def documents(sizes: Sizes, record: Record) -> None:
    given = drawn(1, sizes.tokens, sizes)
    generator = torch.Generator().manual_seed(0)
    sets = [offsets_drawn(sizes.tokens, 8, generator) for _ in range(64)]
    compiled = torch.compile(flex_attention, dynamic=False)
    turn = {"ours": 0, "flash": 0, "flex": 0}

    def next_of(name: str) -> Tensor:
        turn[name] += 1
        return sets[turn[name] % len(sets)]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flatout.attention(q, k, v, mask=masks.documents(next_of("ours")) & masks.causal())

    def direct(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash(next_of("flash"))(q, k, v)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        offsets = next_of("flex")
        ids = torch.arange(8).repeat_interleave(offsets.diff()).to(DEVICE)

        def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (ids[i] == ids[j]) & (i >= j)

        return compiled(q, k, v, block_mask=create_block_mask(mod, None, None, len(ids), len(ids), device=DEVICE))

    variants: dict[str, Attend] = {"ours": ours}
    if ON_GPU:
        variants["flash"] = direct
        variants["flex"] = theirs
    pairs = median(causal_pairs(offsets.diff()) for offsets in sets)
    what = raced(variants, given, sizes.rounds * 2, 4 * sizes.heads * sizes.width * pairs)
    record.add("documents, new every step", what)


def packed(sizes: Sizes, record: Record) -> None:
    rows, length = 4, sizes.tokens // 4
    own = Sizes(sizes.tokens, 2, 32, sizes.rounds) if not ON_GPU else Sizes(sizes.tokens, 32, 64, sizes.rounds)
    given, generator = drawn(rows, length, own), torch.Generator().manual_seed(0)
    sets = []
    for _ in range(16):
        offsets = [offsets_drawn(length, 3, generator) for _ in range(rows)]
        ids = torch.stack([torch.arange(3).repeat_interleave(each.diff()) for each in offsets]).to(DEVICE, torch.int32)
        flat = torch.cat(
            [each[:-1] + row * length for row, each in enumerate(offsets)] + [torch.tensor([rows * length])]
        )
        sets.append((ids, flat))
    turn = {"ours": 0, "dense mask": 0, "flash": 0, "cudnn": 0, "flex": 0}
    compiled = torch.compile(flex_attention, dynamic=False)

    def next_of(name: str) -> tuple[Tensor, Tensor]:
        turn[name] += 1
        return sets[turn[name] % len(sets)]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flatout.attention(q, k, v, mask=masks.documents(ids=next_of("ours")[0]) & masks.causal())

    def by_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash(next_of("flash")[1])(q, k, v)

    def by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash(next_of("cudnn")[1], kernel=(cudnn_forward, cudnn_backward))(q, k, v)

    def by_dense_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ids, _ = next_of("dense mask")
        return attention_by_dense_mask(q, k, v, (ids[:, None, :, None] == ids[:, None, None, :]).tril())

    def by_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ids, _ = next_of("flex")

        def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (ids[b, i] == ids[b, j]) & (i >= j)

        return compiled(q, k, v, block_mask=create_block_mask(mod, rows, None, length, length, device=DEVICE))

    variants: dict[str, Attend] = {"ours": ours, "dense mask": by_dense_mask}
    if ON_GPU:
        variants |= {"flash": by_flash, "cudnn": by_cudnn, "flex": by_flex}
    pairs = median(causal_pairs(flat.diff()) for _, flat in sets)
    what = raced(variants, given, own.rounds, 4 * own.heads * own.width * pairs)
    what["kernel"] = str(attention_selection(*given[:3], mask=masks.documents(ids=sets[0][0]) & masks.causal()))
    what["off"] = {name: packed_off(attend, given, sets[0][0], turn, name) for name, attend in variants.items()}
    record.add("packed rows, new every step", what)


def packed_off(attend: Attend, given: Inputs, ids: Tensor, turn: dict[str, int], name: str) -> list[float] | str:
    turn[name] = -1  # the first set comes next
    same = ids[:, :, None] == ids[:, None, :]
    try:
        return off(attend, given, lambda b: same[b].tril())
    except Exception as error:  # noqa: BLE001 -- as in a race
        return f"{type(error).__name__}: {error}"[:300]


def irregular(sizes: Sizes, record: Record) -> None:
    length = 65536 if ON_GPU else 2048
    generator = torch.Generator().manual_seed(0)
    given = drawn(1, length, sizes._replace(heads=4))
    reach = torch.randint(1, 300, (length,), generator=generator)
    parents = (torch.arange(length) - reach).clamp(min=-1)
    near = torch.randint(-500, 500, (length, 16), generator=generator) + torch.arange(length)[:, None]
    crow, col = torch.arange(0, 16 * length + 1, 16), near.clamp(0, length - 1).reshape(-1)
    record.add(f"tree {length}", of_structure(lambda: masks.tree(parents), given, is_built_densely=True))
    record.add(f"graph {length}", of_structure(lambda: masks.graph(crow, col), given, is_built_densely=False))


def of_structure(make: Callable[[], Mask], given: Inputs, *, is_built_densely: bool) -> dict[str, Any]:
    """Seconds and bytes from the structure to the gradients, and what create_block_mask takes for the same blocks."""
    length = given.q.size(2)

    def whole() -> Mask:
        mask = make()
        gradients(flatout.attention(*given[:3], mask=mask), given)
        return mask

    began_s = perf_counter()
    mask = whole()
    what: dict[str, Any] = {"first_s": perf_counter() - began_s}
    what["again_from_the_structure_s"] = median(seconds(whole) for _ in range(3))
    what["both_ms"] = (
        median(seconds(lambda: gradients(flatout.attention(*given[:3], mask=mask), given)) for _ in range(5)) * 1e3
    )
    if ON_GPU:
        what["peak_bytes"] = peak_bytes(whole)
    if ON_GPU and is_built_densely:
        mod = mask.to(DEVICE).mod()
        what["create_block_mask_peak_bytes"] = peak_bytes(
            lambda: create_block_mask(mod, None, None, length, length, device=DEVICE)
        )
    return what


def peak_bytes(work: Callable[[], Any]) -> int:
    """Above what is held before."""
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - base


def lengths(sizes: Sizes, record: Record) -> None:
    from torch._dynamo.utils import counters

    given = drawn(1, sizes.tokens, sizes)
    generator = torch.Generator().manual_seed(1)
    cap = scores.softcap(20.0)
    what = {}
    for name, score in (("documents", None), ("documents and softcap", cap)):
        num = {}
        for number in range(101):
            mask = masks.documents(offsets_drawn(sizes.tokens, 3 + number % 20, generator)) & masks.causal()
            gradients(flatout.attention(*given[:3], mask=mask, score=score), given)
            if number in (0, 100):
                num[number] = counters["stats"]["unique_graphs"]
        what[name] = {"compiled_for_the_first": num[0], "recompiled_for_100_more": num[100] - num[0]}
    record.add("100 sets of lengths", what)


PARTS: dict[str, Callable[[Sizes, Record], None]] = {
    "causal": causal,
    "documents": documents,
    "packed": packed,
    "window": window,
    "softcap": softcap,
    "irregular": irregular,
    "lengths": lengths,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    torch.manual_seed(0)
    sizes = Sizes(512, 2, 32, 2) if options.small else Sizes(16384, 16, 128, 15)
    record = Record(options.out)
    for name in wanted:
        PARTS[name](sizes, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
