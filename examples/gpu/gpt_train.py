"""Train a GPT on the Python reference manual.

On a CUDA device the default is the size of GPT-2 small (12 layers, width 768, vocabulary 50304);
on a CPU it is a toy, so that the script can be tried anywhere.
"""

import argparse
import re
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.register_buffer("places", torch.arange(context), persistent=False)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.apply(self.init_weights)
        self.head.weight = self.token.weight

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(self.places[: tokens.shape[1]])
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_tokens() -> Tensor:
    """Words, spaces and signs of the manual, numbered by first appearance."""
    pieces = re.findall(r" ?[A-Za-z]+| ?[0-9]+|\s+|.", "".join(topics[name] for name in sorted(topics)))
    index: dict[str, int] = {}
    return torch.tensor([index.setdefault(piece, len(index)) for piece in pieces])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--vocab", type=int, help="rows of the embedding, at least the words of the text")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=6e-4)
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    small = dict(layers=2, width=64, heads=4, context=128, batch=4, vocab=8192)
    gpt2_small = dict(layers=12, width=768, heads=12, context=1024, batch=16, vocab=50304)
    for name, value in (small if args.device == "cpu" else gpt2_small).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    data = read_tokens()
    if data.max() >= args.vocab:
        raise SystemExit(f"the text has {int(data.max()) + 1} words, --vocab is {args.vocab}")
    data = data.to(args.device)
    window = torch.arange(args.context + 1, device=args.device)
    kind = torch.device(args.device).type

    model = GPT(args.vocab, args.width, args.heads, args.layers, args.context).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True)
    num_weights = sum(p.numel() for p in model.parameters())
    print(f"{num_weights / 1e6:.1f} M weights on {args.device}")

    running = None
    for step in range(1, args.steps + 1):
        start = torch.randint(len(data) - args.context, (args.batch, 1), device=args.device)
        chunk = data[start + window]
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
            loss = model(chunk[:, :-1], chunk[:, 1:])
        running = loss.item() if running is None else 0.95 * running + 0.05 * loss.item()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norms = {name: weight.grad.norm().item() for name, weight in model.named_parameters()}
        optimizer.step()
        if step % 20 == 0:
            steepest = max(norms, key=lambda name: norms[name])
            print(f"step {step:4d}  running loss {running:.4f}  steepest {steepest} {norms[steepest]:.3f}")
    print(f"final loss {running:.6f}")


if __name__ == "__main__":
    main()
