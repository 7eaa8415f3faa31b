"""A character GPT on the texts of Python's own help, spread over ranks as a layout says.

python examples/layouts/char_gpt.py                                                  # alone
flatout run --layout examples/layouts/two-stages.toml examples/layouts/char_gpt.py   # on as many ranks as the layout takes
"""

import argparse
import pydoc_data.topics

import torch
import torch.nn.functional as F
from torch import nn

import flatout

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids, positions):  # positions are an input, since a rank may have a part of the tokens
        x = self.characters(ids) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mean_loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    text = "".join(pydoc_data.topics.topics.values())
    characters = sorted(set(text))
    known = {c: i for i, c in enumerate(characters)}
    data = torch.tensor([known[c] for c in text])
    torch.manual_seed(0)
    with flatout.World("cpu") as world:
        layout = flatout.layout_from_environment(world, global_batch=8)
        size = layout.global_batch
        positions = torch.arange(CONTEXT).expand(size, CONTEXT)
        random = torch.Generator().manual_seed(1)

        def batch():
            begins = torch.randint(len(data) - CONTEXT - 1, (size,), generator=random)
            rows = torch.stack([data[i : i + CONTEXT + 1] for i in begins])
            return rows[:, :-1], rows[:, 1:]

        model = GPT(len(characters))
        ids, target = batch()
        agreement = flatout.check_layout(model, layout, world, ids, positions, target=target, loss=mean_loss)
        if world.is_first:
            print(f"{world.num_ranks} rank(s): {agreement}")
        example = (ids[: layout.micro_batch], positions[: layout.micro_batch])
        parallel = flatout.parallelize(model, layout, world, example=example)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=3e-3)
        for step in range(steps):
            ids, target = batch()  # all ranks draw the same, and take their share
            mine, where, wanted = parallel.share((ids, positions, target))
            optimizer.zero_grad()
            loss = parallel.step(mine, where, target=wanted, loss=mean_loss)
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            if world.is_first and (step + 1) % 5 == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
