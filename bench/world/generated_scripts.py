"""Makes training scripts that combine what people do in loops: `script_of(seed)` is the text of one, and which features it has.

Small models on data that are drawn when the script starts; a few hundred steps of some milliseconds. Each script prints its last
losses (`losses 0.1234 ...`). MOVE_SEED in the environment moves its seed; its argument is the number of epochs. For a GPU
the model and each batch are moved there, some with autocast around the model.
"""

from __future__ import annotations

import random
import re
import textwrap
from typing import NamedTuple


class Generated(NamedTuple):
    """One script: its text, and the names of the features that were drawn for it."""

    text: str
    features: tuple[str, ...]


_HEAD = """
import copy
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.manual_seed({seed} + int(os.environ.get("MOVE_SEED", "0")))
"""

_MODELS = {
    "mlp": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(48, 128), nn.Linear(128, 128), nn.Linear(128, 4)
        self.dropout = nn.Dropout({dropout})

    def forward(self, x):
        x = {activation}(self.first(x))
        x = self.dropout(x)
        x = x + {activation}(self.second(x))
        return self.out(x)
""",
        "torch.randn(2048, 48)",
    ),
    "cnn": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.out = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Linear(32, 4)
        self.dropout = nn.Dropout2d({dropout})

    def forward(self, x):
        x = {activation}(self.norm(self.conv1(x)))
        x = self.dropout({activation}(self.conv2(x)))
        return self.out(x.mean((2, 3)))
""",
        "torch.randn(1024, 3, 16, 16)",
    ),
    "lstm": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(12, 48, batch_first=True), nn.Linear(48, 4)
        self.dropout = nn.Dropout({dropout})

    def forward(self, x):
        states, _ = self.rnn(x)
        return self.out(self.dropout(states[:, -1]))
""",
        "torch.randn(1024, 20, 12)",
    ),
    "attention": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 4)
        self.norm, self.dropout = nn.LayerNorm(32), nn.Dropout({dropout})

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-2, -1) / 32**0.5, dim=-1)
        x = x + self.project(self.dropout(weights) @ v)
        return self.out({activation}(x).mean(1))
""",
        "torch.randn(1024, 24, 32)",
    ),
    "cell": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(8, 32), nn.Linear(32, 4)

    def forward(self, x):
        state = x.new_zeros(len(x), 32)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.out(state)
""",
        "torch.randn(512, 12, 8)",
    ),
}
_ACTIVATIONS = {
    "relu": "torch.relu",
    "gelu": "F.gelu",
    "gelu written out": "gelu",
    "in-place relu": "F.relu_",
    "custom function": "Cubed.apply",
}
_CUSTOM = """
class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))
"""
_OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
    "adam": "torch.optim.Adam(model.parameters(), lr=2e-3)",
    "adamw in groups": (
        "torch.optim.AdamW([{'params': [p for p in model.parameters() if p.dim() > 1]}, "
        "{'params': [p for p in model.parameters() if p.dim() < 2], 'weight_decay': 0.0}], lr=2e-3)"
    ),
    "rmsprop": "torch.optim.RMSprop(model.parameters(), lr=1e-3)",
}
_DATA = {
    "tensors": "loader = DataLoader(TensorDataset(inputs, labels), batch_size=64, shuffle=True)",
    "items normalised": """
class Items(Dataset):
    def __len__(self):
        return len(inputs)

    def __getitem__(self, index):
        item = inputs[index].numpy()
        return torch.from_numpy((item - item.mean()) / (item.std() + 1e-5)), labels[index]


loader = DataLoader(Items(), batch_size=64, shuffle=True)
""",
    "items augmented": """
class Items(Dataset):
    def __len__(self):
        return len(inputs)

    def __getitem__(self, index):
        return inputs[index] + 0.05 * torch.randn_like(inputs[index]), labels[index]


loader = DataLoader(Items(), batch_size=64, shuffle=True)
""",
    "batches by randperm": """
class Batches:
    def __iter__(self):
        order = torch.randperm(len(inputs))
        for start in range(0, len(inputs) - 63, 64):
            rows = order[start : start + 64]
            yield inputs[rows], labels[rows]


loader = Batches()
""",
}


def script_of(seed: int, device: str = "cpu") -> Generated:
    """The script of this seed, for a processor ("cpu") or a GPU ("cuda")."""
    draw = random.Random(seed)
    if draw.random() < 0.12:
        return _on(device, _gan(draw, seed))
    if draw.random() < 0.08:
        return _on(device, _with_closure(draw, seed))
    model, activation = draw.choice([*_MODELS]), draw.choice([*_ACTIVATIONS])
    optimizer, data = draw.choice([*_OPTIMIZERS]), draw.choice([*_DATA])
    dropout = draw.choice([0.0, 0.0, 0.1])
    features = [model, optimizer, data, *([activation] if model not in ("lstm", "cell") else [])]
    features += ["dropout"] if dropout and model != "cell" else []
    extra = draw.sample(
        ["accumulation", "clipping", "ema", "scheduler", "evaluation", "evaluation with a graph", "early stopping", "noise",
         "logging", "hooks", "tied weights", "grad scaler", "numpy round trip", "trainer class", "detached penalty"],
        draw.randint(1, 5),
    )  # fmt: skip
    features += extra
    text, inputs = _MODELS[model]
    parts = [
        _HEAD.format(seed=seed),
        _CUSTOM,
        text.format(dropout=dropout, activation=_ACTIVATIONS[activation]),
        f"inputs = {inputs}\nlabels = (inputs.flatten(1)[:, :6].sum(1).abs() * 1.5).long().clamp(max=3)\n",
        _DATA[data] + "\n",
        "model = Net()\n",
        _tied(model) if "tied weights" in extra else "",
        _HOOKS if "hooks" in extra else "",
        f"optimizer = {_OPTIMIZERS[optimizer]}\n",
        "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)\n" if "scheduler" in extra else "",
        "averaged = copy.deepcopy(model)\n" if "ema" in extra else "",
        "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n" if "grad scaler" in extra else "",
        _loop(extra),
    ]
    return _on(device, Generated("".join(textwrap.dedent(p) for p in parts), tuple(features)), autocast=seed % 3 == 0)


_ON_GPU = {
    "torch.manual_seed(": 'device = torch.device("cuda")\ntorch.manual_seed(',
    "model = Net()": "model = Net().to(device)",
    "nn.Linear(64, 1))": "nn.Linear(64, 1)).to(device)",
    "nn.Linear(96, 24))": "nn.Linear(96, 24)).to(device)",
    "nn.Linear(96, 1))": "nn.Linear(96, 1)).to(device)",
    "GradScaler('cpu'": "GradScaler('cuda'",
    "for x, y in loader:": "for x, y in loader:\n    x, y = x.to(device), y.to(device)",
    "np.clip(x.numpy(), -3, 3))": "np.clip(x.cpu().numpy(), -3, 3)).to(device)",
    "(inputs[:256]), labels[:256])": "(inputs[:256].to(device)), labels[:256].to(device))",
    "losses = []\nfor step": "real = real.to(device)\nlosses = []\nfor step",
    "torch.randn(64, 16)": "torch.randn(64, 16, device=device)",
    "inputs = torch.randn(512, 24)": "inputs = torch.randn(512, 24).to(device)",
}
_AUTOCAST = {
    "output = model(x)": "with torch.autocast('cuda', dtype=torch.bfloat16):\n    output = model(x)\noutput = output.float()"
}


def _on(device: str, generated: Generated, *, autocast: bool = False) -> Generated:
    """The script as it is written for a GPU; unchanged for a processor."""
    if device == "cpu":
        return generated
    text, features = generated
    for find, by in (_ON_GPU | (_AUTOCAST if autocast else {})).items():
        text = _replaced(text, find, by)
    return Generated(text, (*features, device, *(["autocast"] if autocast else [])))


def _replaced(text: str, find: str, by: str) -> str:
    """The text with `by` where a line has `find`; more lines of `by` are indented as that line is."""
    pattern = rf"(?m)^( *)(.*?){re.escape(find)}"
    return re.sub(pattern, lambda line: line[1] + line[2] + by.replace("\n", "\n" + line[1]), text)


_HOOKS = """
seen = []


def watch(module, args, output):
    if len(seen) < 3:
        seen.append(float(output.detach().mean()))


model.out.register_forward_hook(watch)
model.out.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
"""


def _tied(model: str) -> str:
    return (
        "model.second.weight = nn.Parameter(model.second.weight.data)\nmodel.tied = model.second\n"
        if model == "mlp"
        else ""
    )


def _loop(extra: list[str]) -> str:
    """The training loop, with what was drawn for it."""
    every = 2 if "accumulation" in extra else 1
    lines = [
        "x = x + 0.01 * torch.randn_like(x)" if "noise" in extra else "",
        "x = torch.from_numpy(np.clip(x.numpy(), -3, 3))" if "numpy round trip" in extra else "",
        "output = model(x)",
        "loss = F.cross_entropy(output, y)",
        "loss = loss + 0.01 * (output - output.detach()).square().mean() + 1e-3 * output.square().mean()"
        if "detached penalty" in extra
        else "",
    ]
    scaled = "grad scaler" in extra
    lines += [
        f"{'scaler.scale(loss)' if scaled else 'loss'}{'' if every == 1 else ' / 2'}.backward()".replace(
            "loss / 2.", "(loss / 2)."
        )
    ]
    if scaled and every == 2:
        lines[-1] = "scaler.scale(loss / 2).backward()"
    update = [
        "scaler.unscale_(optimizer)" if scaled and "clipping" in extra else "",
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)" if "clipping" in extra else "",
        *(("scaler.step(optimizer)", "scaler.update()") if scaled else ("optimizer.step()",)),
        "optimizer.zero_grad()",
        "scheduler.step()" if "scheduler" in extra else "",
        "for mean, parameter in zip(averaged.parameters(), model.parameters()):\n"
        "    mean.data.lerp_(parameter.data, 0.05)"
        if "ema" in extra
        else "",
    ]
    block = "\n".join(filter(None, update))
    lines += [f"if number % {every} == {every - 1}:\n{textwrap.indent(block, '    ')}" if every > 1 else block]
    lines += ["losses.append(loss.item())" if "logging" in extra else "losses.append(loss.detach())", "number += 1"]
    body = "\n".join(filter(None, lines))
    epoch = [f"for x, y in loader:\n{textwrap.indent(body, '    ')}"]
    if "evaluation" in extra or "evaluation with a graph" in extra:
        context = "torch.no_grad()" if "evaluation" in extra else "torch.enable_grad()"
        network = "averaged" if "ema" in extra else "model"
        epoch += [
            f"{network}.eval()\nwith {context}:\n    evaluation = float(F.cross_entropy({network}(inputs[:256]), labels[:256]))\n"
            f"{network}.train()"
        ]
        if "early stopping" in extra:
            epoch += ["best = min(best, evaluation)\nif evaluation > best + 0.5:\n    break"]
    rounds = textwrap.indent("\n".join(epoch), "    ")
    epochs = "int(sys.argv[1]) if len(sys.argv) > 1 else 60"
    state = "losses, number, best, evaluation = [], 0, float('inf'), float('nan')"
    ending = "print('losses', *(f'{float(x):.5f}' for x in losses[-20:]))\nprint('evaluation', f'{evaluation:.5f}')"
    if "trainer class" not in extra:
        return f"{state}\nfor epoch in range({epochs}):\n{rounds}\n{ending}\n"
    method = textwrap.indent(
        f"{state}\nfor epoch in range({epochs}):\n{rounds}\nself.losses, self.evaluation = losses, evaluation",
        "        ",
    )
    ending = ending.replace("losses[", "trainer.losses[").replace("{evaluation:", "{trainer.evaluation:")
    return f"\nclass Trainer:\n    def fit(self):\n{method}\n\n\ntrainer = Trainer()\ntrainer.fit()\n{ending}\n"


def _gan(draw: random.Random, seed: int) -> Generated:
    """A generator and a critic in turn, with an optimizer each."""
    detached = draw.random() < 0.5
    penalty = draw.random() < 0.4
    text = (
        _HEAD.format(seed=seed)
        + f"""
generator = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 24))
critic = nn.Sequential(nn.Linear(24, 96), nn.LeakyReLU(0.2{", inplace=True" if draw.random() < 0.5 else ""}), nn.Linear(96, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
real = torch.randn(2048, 24) @ torch.randn(24, 24) / 5
losses = []
for step in range(int(sys.argv[1]) * 30 if len(sys.argv) > 1 else 1800):
    batch = real[torch.randint(len(real), (64,))]
    fake = generator(torch.randn(64, 16)){".detach()" if detached else ""}
    loss = F.softplus(-critic(batch)).mean() + F.softplus(critic(fake)).mean()
    {"middle = (0.5 * batch + 0.5 * fake.detach()).requires_grad_()" if penalty else "pass"}
    {"slope, = torch.autograd.grad(critic(middle).sum(), middle, create_graph=True)" if penalty else "pass"}
    {"loss = loss + (slope.norm(dim=1) - 1).square().mean()" if penalty else "pass"}
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()
    if step % 2 == 0:
        cheating = F.softplus(-critic(generator(torch.randn(64, 16)))).mean()
        of_generator.zero_grad()
        cheating.backward()
        of_generator.step()
    losses.append(loss.item())
print('losses', *(f'{{x:.5f}}' for x in losses[-20:]))
"""
    )
    features = [
        "gan",
        "several optimizers",
        *(["detach"] if detached else ["no detach"]),
        *(["double backward"] if penalty else []),
    ]
    return Generated(text, tuple(features))


def _with_closure(draw: random.Random, seed: int) -> Generated:
    """An optimizer that calls the loss itself."""
    text = (
        _HEAD.format(seed=seed)
        + f"""
model = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 1))
inputs = torch.randn(512, 24)
targets = inputs[:, :4].sin().sum(1, keepdim=True)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter={draw.choice([4, 8])})
losses = []


def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


for step in range(int(sys.argv[1]) * 10 if len(sys.argv) > 1 else 400):
    losses.append(float(optimizer.step(closure)))
print('losses', *(f'{{x:.5f}}' for x in losses[-20:]))
"""
    )
    return Generated(text, ("closure", "lbfgs"))
