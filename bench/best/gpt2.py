"""GPT-2 124M by nanoGPT, at its best settings, on the text and the steps of examples/gpu/gpt2_naive.py.

    NANOGPT=CHECKOUT python bench/best/gpt2.py [--batch 64] [--compile default|max-autotune] [--accumulate 1]

Model and optimizer are those of the checkout's model.py (MIT): bfloat16 autocast, torch.compile, fused AdamW, a vocabulary padded
to 50304. `--accumulate` micro-batches make one step, as its train.py does. As in the example, layers have biases, and gradients
are not clipped.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpu"))
sys.path.insert(0, os.environ.get("NANOGPT", "nanoGPT"))

from gpt2_naive import read_tokens
from model import GPT, GPTConfig


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12 if on_gpu else 2)
    parser.add_argument("--width", type=int, default=768 if on_gpu else 64)
    parser.add_argument("--heads", type=int, default=12 if on_gpu else 4)
    parser.add_argument("--context", type=int, default=1024 if on_gpu else 128)
    parser.add_argument("--batch", type=int, default=64 if on_gpu else 4)
    parser.add_argument("--vocab", type=int, default=50304 if on_gpu else 9024)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--compile", default="default")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    tokens = read_tokens().to(device)
    config = GPTConfig(
        block_size=args.context,
        vocab_size=args.vocab,
        n_layer=args.layers,
        n_head=args.heads,
        n_embd=args.width,
        dropout=0.0,
        bias=True,
    )
    model = GPT(config).to(device)
    optimizer = model.configure_optimizers(1e-2, 3e-4, (0.9, 0.999), device)
    compiled = torch.compile(model, mode=None if args.compile == "default" else f"{args.compile}-no-cudagraphs")
    offsets = torch.arange(args.context + 1, device=device)
    for step in range(1, args.steps + 1):
        for _ in range(args.accumulate):
            starts = torch.randint(len(tokens) - args.context - 1, (args.batch,)).to(device, non_blocking=True)
            window = tokens[starts[:, None] + offsets]
            with torch.autocast(device, torch.bfloat16):
                _, loss = compiled(window[:, :-1].contiguous(), window[:, 1:].contiguous())
            (loss / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
