"""Random small models are pruned to what their masked originals give, or refused; never to a wrong answer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flatout.core.errors import PlanError
from flatout.shrink.prune import apply_pruning, prune

pytestmark = pytest.mark.slow

KINDS = (
    "linear",
    "gelu",
    "norm",
    "residual",
    "concat",
    "gated",
    "heads",
    "gru",
    "convolution",
    "grouped",
    "scaled",
    "halves",
)


class Piece(nn.Module):
    """One step on [B, T, W], of a kind; the width changes with what it makes."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.width, self.heads = kind, width, 2
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width) if kind == "norm" else nn.GroupNorm(2, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.mix = nn.Conv1d(width, width, 3, padding=1, groups=2 if kind == "grouped" else 1)
        self.scale = nn.Parameter(torch.randn(width))
        self.out_width = 2 * width if kind == "concat" else width // 2 if kind == "halves" else width

    def forward(self, x: Tensor) -> Tensor:
        size_b, size_t, _ = x.shape
        match self.kind:
            case "linear":
                return self.a(x)
            case "gelu":
                return F.gelu(x)
            case "norm":
                return self.norm(x)
            case "residual":
                return x + self.b(torch.relu(self.a(x)))
            case "concat":
                return torch.cat((x, torch.tanh(self.a(x))), -1)
            case "gated":
                return self.a(x) * torch.sigmoid(self.b(x))
            case "heads":
                q, k = (f(x).view(size_b, size_t, self.heads, -1).transpose(1, 2) for f in (self.a, self.b))
                return F.scaled_dot_product_attention(q, k, q).transpose(1, 2).flatten(2)
            case "gru":
                return self.gru(x)[0]
            case "scaled":
                return x * self.scale
            case "halves":
                one, other = self.a(x).chunk(2, -1)
                return one + other
            case _:
                return self.norm(self.mix(x.transpose(1, 2))).transpose(1, 2)


def built(kinds: list[str]) -> nn.Module:
    width, pieces = 8, []
    pieces.append(nn.Linear(5, width))
    for kind in kinds:
        if (width <= 4 and kind == "halves") or (width >= 16 and kind == "concat"):
            continue
        piece = Piece(kind, width)
        width = piece.out_width
        pieces.append(piece)
    return nn.Sequential(*pieces, nn.Linear(width, 3))


@settings(max_examples=15)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    fraction=st.sampled_from([0.25, 0.5, 0.7]),
    seed=st.integers(0, 9),
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.long
def test_a_random_model_is_pruned_right_or_refused(kinds: list[str], fraction: float, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, x = built(kinds).double().eval(), torch.randn(2, 4, 5, dtype=torch.float64)
    try:
        pruned = prune(model, (x,), fraction=fraction, importance="random", seed=seed)
    except PlanError:
        return
    assert pruned.report.error <= 1e-8
    assert pruned.report.num_parameters < pruned.report.num_parameters_before
    assert pruned.model(x).shape == (2, 4, 3)
    if not {"norm", "convolution", "grouped"} & set(kinds):
        assert_dead_units_go_without_a_trace(model, x, pruned.plan)


def assert_dead_units_go_without_a_trace(model: nn.Module, x: Tensor, plan: object) -> None:
    """An own check, without the masked reference: zero the slices that go, in the original."""
    with torch.no_grad():
        tensors = dict(model.named_parameters())
        for name, remaining in plan.remaining.items():  # type: ignore[attr-defined]
            for dim, own in enumerate(remaining):
                if own is not None:
                    gone = sorted(set(range(tensors[name].shape[dim])) - set(own))
                    tensors[name].index_fill_(dim, torch.tensor(gone), 0.0)
        torch.testing.assert_close(apply_pruning(model, plan)(x), model(x))  # type: ignore[arg-type]
