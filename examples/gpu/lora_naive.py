"""LoRA fine-tuning of the model of llama_naive.py as a first version is written: float32, adapters by hand, a plain loop.

The weights of the model are frozen; each of its products has an adapter of rank 16. On a CPU it is a toy, so that the script can
be tried anywhere.
"""

import torch
from llama_naive import Llama, parse, read_documents
from torch import nn


class WithAdapter(nn.Module):
    def __init__(self, linear, rank, scale):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        self.scale = scale
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.linear(x) + self.scale * self.up(self.down(x))


def add_adapters(model, rank, scale):
    """Freeze the model, and put an adapter beside each product of its layers."""
    for weight in model.parameters():
        weight.requires_grad = False
    for block in model.blocks:
        for part in (block.attention, block.feed_forward):
            for name, linear in list(part.named_children()):
                setattr(part, name, WithAdapter(linear, rank, scale))


def main():
    parser = parse(__doc__)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    tokens = torch.cat(read_documents()).to(device)
    sizes = (args.width, args.heads, args.kv_heads, args.inner, args.layers, args.context)
    model = Llama(args.vocab, *sizes)
    add_adapters(model, args.rank, 2.0)
    model = model.to(device)
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-3)
    offsets = torch.arange(args.context + 1, device=device)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(tokens) - args.context - 1, (args.batch,)).to(device)
        rows = tokens[starts[:, None] + offsets]
        loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
