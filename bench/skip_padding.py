"""An encoder on padded passages with `flatout.skip_padding`, against the same compiled, and compiled on cut batches, in turn.

    python bench/skip_padding.py OUT.json [--seconds 20] [--small]

The encoder and the passages are those of examples/gpu/bert_ragged.py, with attention in one kernel: BERT-base with batches of
32 x 512 under autocast to bfloat16 on a GPU, width 256, four layers and 16 x 256 in float32 on a CPU. A call takes the same eight
batches through forward and backward. `cut` are batches as wide as their longest row, rounded up to a 16th, with dynamic shapes;
`graphs` are CUDA graphs for each number of packed rows. Errors are of all gradients against float64 over their norm. Ratios are
of medians within rounds: how many times as fast as `compiled`.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout import skip_padding
from flatout.machine.measure.probe import cpu_model
from flatout.machine.measure.timer import compare_times

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "gpu"))

import bert_ragged as example

NUM_BATCHES = 8


class Attention(example.SelfAttention):
    """The example's, in one kernel."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
        return self.out(y.transpose(1, 2).reshape(B, T, C))  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    width, layers, longest, batch = (
        (768, 12, 512, 32) if on_gpu else (64, 2, 96, 8) if args.small else (256, 4, 256, 16)
    )
    device = "cuda" if on_gpu else "cpu"
    torch.manual_seed(0)
    model = example.Encoder(30522, width, width // 64, layers, longest, 16)
    for layer in model.layers:
        layer.attention.__class__ = Attention
    model = model.to(device)
    batches = [padded(longest, batch, seed) for seed in range(NUM_BATCHES)]
    real = sum(int((tokens != 0).sum()) for tokens, _ in batches) / sum(tokens.numel() for tokens, _ in batches)
    ways = compiled_models(model, multiple=batch * longest // 64, on_gpu=on_gpu)
    exact = gradients(copy.deepcopy(model).double(), batches[0], device, has_autocast=False)
    calls: dict[str, Callable[[], object]] = {}
    errors = {}
    for name, (one, prepared) in ways.items():
        own = [(prepared(tokens).to(device), labels.to(device)) for tokens, labels in batches]
        found = gradients(one, own[0], device, has_autocast=on_gpu)
        errors[name] = float((found - exact).norm() / exact.norm())
        calls[name] = partial(passes, one, own, device, on_gpu)
    times = compare_times(calls, device=device, min_time_s=args.seconds, max_time_s=10 * args.seconds, warmup=4)
    rows = {}
    for name, time in times.items():
        ratio = time.ratio
        faster = None if ratio is None else [1 / ratio.value, 1 / ratio.high, 1 / ratio.low]
        rows[name] = {"batch_s": time.call_s.value / NUM_BATCHES, "times_as_fast": faster, "error": errors[name]}
        print(name, json.dumps(rows[name]))
    hardware = {"device": torch.cuda.get_device_name() if on_gpu else cpu_model(), "threads": torch.get_num_threads()}
    sizes = {"width": width, "layers": layers, "longest": longest, "batch": batch, "real": real}
    found_all = {"hardware": hardware, "torch": torch.__version__, **sizes, "ways": rows}
    args.out.write_text(json.dumps(found_all, indent=1) + "\n")


def compiled_models(
    model: nn.Module, *, multiple: int, on_gpu: bool
) -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """The models by name, and what each does to a batch of tokens first."""

    def as_it_is(tokens: Tensor) -> Tensor:
        return tokens

    def cut(tokens: Tensor) -> Tensor:
        part = tokens.shape[1] // 16
        filled = int((tokens != 0).sum(1).max())
        return tokens[:, : -(-filled // part) * part].contiguous()

    compiled, shorter, packed = (copy.deepcopy(model) for _ in range(3))
    compiled.compile()
    shorter.compile(dynamic=True)
    skip_padding(packed, multiple=multiple)
    found: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {}
    found |= {"compiled": (compiled, as_it_is), "cut": (shorter, cut), "skip_padding": (packed, as_it_is)}
    both = copy.deepcopy(model)
    skip_padding(both, multiple=multiple)
    found["skip_padding, cut"] = (both, cut)
    if on_gpu:
        in_graphs = copy.deepcopy(model)
        skip_padding(in_graphs, multiple=multiple, options={"triton.cudagraphs": True})
        found["skip_padding, graphs"] = (in_graphs, as_it_is)
    return found


def padded(longest: int, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Passages of the example's lengths, as it pads them."""
    generator = torch.Generator().manual_seed(seed)
    data = example.passages(longest, 30522, torch.Generator().manual_seed(1))
    rows = torch.randint(len(data), (batch,), generator=generator).tolist()
    tokens = torch.zeros(batch, longest, dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(data[row][0])] = data[row][0]
    return tokens, torch.tensor([data[row][1] for row in rows])


def passes(model: nn.Module, batches: list[tuple[Tensor, Tensor]], device: str, has_autocast: bool) -> None:
    for tokens, labels in batches:
        with torch.autocast(device, torch.bfloat16, enabled=has_autocast):
            loss = F.cross_entropy(model(tokens).float(), labels)
        model.zero_grad()
        loss.backward()


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor], device: str, *, has_autocast: bool) -> Tensor:
    """All gradients, one behind the other, in float64."""
    passes(model, [(batch[0].to(device), batch[1].to(device))], device, has_autocast)
    found: list[Any] = [p.grad for p in model.parameters()]
    return torch.cat([g.double().flatten() for g in found if g is not None])


if __name__ == "__main__":
    main()
