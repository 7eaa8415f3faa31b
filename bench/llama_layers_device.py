"""One layer of Llama in eager mode, as fms of February 2024 and torchtitan of December 2024 wrote it, beside its products alone.

    python bench/llama_layers_device.py FMS TORCHTITAN [--out FILE] [--small]

FMS and TORCHTITAN are checkouts of foundation-model-stack (b06c5dfb) and torchtitan (of 19 December 2024): their own code runs,
but for torch's compiler and process groups. What is over the products and attention is what `gated_traffic` of the planner's
software stands for; bench/planner_tables.py has the ratio of both."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.core.files import write_whole_file

SIZES = ((4096, 32, 32), (5120, 40, 40), (8192, 64, 8))
"""Hidden width, heads, heads of keys."""


def torchtitan_layer(folder: Path, dim: int, heads: int, keys: int, seq: int) -> tuple[Callable[[Tensor], Tensor], int]:
    """Its TransformerBlock, and the width of its feed-forward; the file is run without the imports of its package."""
    text = (folder / "torchtitan" / "models" / "llama" / "model.py").read_text(encoding="utf-8")
    norms = (folder / "torchtitan" / "models" / "norms.py").read_text(encoding="utf-8")
    module = ModuleType("torchtitan_layer")
    start, end = norms.index("class RMSNorm"), norms.index("# FusedRMSNorm in Triton")
    exec("import torch\nimport torch.nn as nn\n" + norms[start:end], module.__dict__)
    module.build_norm = lambda _, dim, eps=1e-5: module.RMSNorm(dim, eps)  # type: ignore[attr-defined]
    head = "from typing import *\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\nModelArgs = object\n"
    start, end = text.index("def precompute_freqs_cis"), text.index("class Transformer(")
    exec(head + text[start:end], module.__dict__)
    sizes = SimpleNamespace(
        dim=dim, n_layers=1, n_heads=heads, n_kv_heads=keys, vocab_size=100, multiple_of=256, norm_eps=1e-5,
        ffn_dim_multiplier=1.3 if keys != heads else None, max_seq_len=seq, depth_init=True, norm_type="rmsnorm",
    )  # fmt: skip
    block = module.TransformerBlock(0, sizes).cuda().bfloat16()
    frequencies = module.precompute_freqs_cis(dim // heads, seq).cuda()
    return (lambda x: block(x, frequencies)), block.feed_forward.w1.weight.shape[0]


def fms_layer(folder: Path, dim: int, heads: int, keys: int, inner: int, seq: int) -> Callable[[Tensor], Tensor]:
    """Its LLaMABlock, of its own modules; what divides tensors is left out, since it needs torch's compiler of then."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        for name in ("fms.distributed", "fms.distributed.tensorparallel", "fms.modules.tp"):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign]
    from fms.modules.attention import MultiHeadAttention
    from fms.modules.feedforward import GatedLinearUnit
    from fms.modules.layernorm import LayerNormParameterized
    from fms.modules.positions import RotaryEmbedding

    positions = RotaryEmbedding(dim // heads, max_seq_len=seq)
    positions.compute_freqs_cis(torch.device("cuda", 0), seq)
    norms = [LayerNormParameterized(dim, use_high_precision_pow=True).cuda().bfloat16() for _ in range(2)]
    width = dim // heads
    attend = (
        MultiHeadAttention(dim, width, width, heads, keys, p_dropout=0.0, position_encoder=positions).cuda().bfloat16()
    )
    feed = GatedLinearUnit(dim, hidden_grow_factor=inner / dim, activation_fn=nn.SiLU(), p_dropout=0, use_bias=False)
    feed = feed.cuda().bfloat16()

    def layer(x: Tensor) -> Tensor:
        y = norms[0](x)
        x = attend(q=y, k=y, v=y, mask=None, is_self=True, is_causal_mask=True) + x
        out: Tensor = feed(norms[1](x)) + x
        return out

    return layer


def products(dim: int, heads: int, keys: int, inner: int) -> Callable[[Tensor], Tensor]:
    """The same products and attention, with one multiplication between."""
    sizes = (
        (dim, dim),
        (dim, dim * keys // heads),
        (dim, dim * keys // heads),
        (dim, dim),
        (dim, inner),
        (dim, inner),
        (inner, dim),
    )
    q, k, v, out, gate, up, down = (nn.Linear(*size, bias=False).cuda().bfloat16() for size in sizes)

    def layer(x: Tensor) -> Tensor:
        b, t, _ = x.shape
        parts = (one(x).view(b, t, -1, dim // heads).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=keys != heads)
        x = out(y.transpose(1, 2).reshape(b, t, dim))
        result: Tensor = down(gate(x) * up(x))
        return result

    return layer


def milliseconds(layer: Callable[[Tensor], Tensor], x: Tensor, repeats: int) -> float:
    """Median of forward and backward; the device sleeps first, so that the host is ahead."""
    gradient = torch.randn_like(layer(x))
    found = []
    for number in range(repeats + 4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)
        start.record()
        layer(x).backward(gradient)
        end.record()
        end.synchronize()
        if number >= 4:
            found.append(start.elapsed_time(end))
    return median(found)


def main() -> None:
    """Time all three at all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fms", type=Path)
    parser.add_argument("torchtitan", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    rows = []
    for dim, heads, keys in ((256, 4, 4),) if asked.small else SIZES:
        seq = 256 if asked.small else 4096
        titan, inner = torchtitan_layer(asked.torchtitan, dim, heads, keys, seq)
        layers = {
            "titan": titan,
            "fms": fms_layer(asked.fms, dim, heads, keys, inner, seq),
            "plain": products(dim, heads, keys, inner),
        }
        x = torch.randn(2, seq, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        row = {name: milliseconds(layer, x, 15) for name, layer in layers.items()}
        rows.append(row | {"dim": dim, "inner": inner, "kv": keys, "tokens": 2 * seq})
        print(rows[-1], flush=True)
    if asked.out:
        found = {"device": torch.cuda.get_device_name(), "torch": str(torch.__version__), "rows": rows}
        write_whole_file(asked.out, json.dumps(found, indent=1).encode())


if __name__ == "__main__":
    main()
