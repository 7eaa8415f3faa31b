"""Real data that comes with packages: handwritten digits, and the text of Python's manual."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Task(NamedTuple):
    """Samples to learn from and others to be judged by; `x` and `y` have the samples first."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


def digits(*, is_image: bool = True, held: int = 597, seed: int = 0) -> Task:
    """1797 handwritten digits of 8 x 8 (scikit-learn): [N, 1, 8, 8], or [N, 64], of mean 0; classes [N]."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.data, dtype=torch.float32) / 16.0
    x = (x - x.mean()) / x.std()
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x = (x.view(-1, 1, 8, 8) if is_image else x)[order]
    y = y[order]
    return Task(x[:-held], y[:-held], x[-held:], y[-held:])


def manual(*, length: int = 64, held: int = 600, words: int = 64) -> Task:
    """Windows [N, length] of the manual's characters (the commonest, others as number 0), and each one's next: [N, length]."""
    from collections import Counter
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    known = {c: i for i, (c, _) in enumerate(Counter(text).most_common(words - 1), start=1)}
    ids = torch.tensor([known.get(c, 0) for c in text])
    num = (len(ids) - 1) // length
    x, y = ids[: num * length].view(num, length), ids[1 : num * length + 1].view(num, length)
    return Task(x[:-held], y[:-held], x[-held:], y[-held:])
