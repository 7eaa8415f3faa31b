from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from flatout.blocks.training import vectorised_draws
from flatout.blocks.training.vectorised_draws import draw_bernoulli, draws_refusal, vectorise_draws
from flatout.core.errors import NativeError

pytestmark = pytest.mark.skipif(bool(draws_refusal()), reason=draws_refusal())
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64)


@pytest.fixture
def drawn_by_vectors() -> Iterator[None]:
    undo = vectorise_draws()
    yield
    undo()


@settings(max_examples=60, deadline=None)
@given(
    num=st.one_of(st.sampled_from([0, 1, 311, 312, 313, 623, 624, 625]), st.integers(0, 5000)),
    drawn_before=st.integers(0, 1300),
    p=st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(0, 1)),
    dtype=st.sampled_from(DTYPES),
)
def test_numbers_and_generator_are_those_of_pytorch(num: int, drawn_before: int, p: float, dtype: torch.dtype) -> None:
    own, other = torch.Generator().manual_seed(num), torch.Generator().manual_seed(num)
    for generator in (own, other):
        torch.empty(drawn_before, dtype=torch.int32).random_(generator=generator)
    plain = torch.empty(num, dtype=dtype).bernoulli_(p, generator=other)
    torch.testing.assert_close(draw_bernoulli(torch.empty(num, dtype=dtype), p, own), plain, rtol=0, atol=0)
    for later in (torch.rand, torch.randn, torch.randperm):
        torch.testing.assert_close(later(700, generator=own), later(700, generator=other), rtol=0, atol=0)


def trained() -> list[torch.Tensor]:
    """Gradients of a model that draws in Python, in a recurrent layer and in attention, and the generator afterwards."""
    torch.manual_seed(3)
    rnn = nn.LSTM(64, 32, num_layers=2, dropout=0.4, batch_first=True)
    x = torch.randn(40, 50, 64, requires_grad=True)
    hidden = rnn(F.dropout(x, 0.3))[0].reshape(40, 2, 50, 16)
    F.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=0.2).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in rnn.parameters() if p.grad is not None), torch.get_rng_state()]


def test_a_model_learns_the_same_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = trained(), []
    original = vectorised_draws.draw_bernoulli
    monkeypatch.setattr(vectorised_draws, "draw_bernoulli", lambda *a: (calls.append(1), original(*a))[1])
    undo = [vectorise_draws()]
    vectorised = trained()
    undo.pop()()
    assert len(calls) == 3
    trained()
    assert len(calls) == 3, "undone, PyTorch draws again"
    for one, other in zip(plain, vectorised, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.slow
def test_it_lasts_where_nobody_keeps_what_undoes_it() -> None:
    script = (
        "import gc, torch\n"
        "from flatout.blocks.training import vectorised_draws\n"
        "vectorised_draws.vectorise_draws()\n"
        "gc.collect()\n"
        "drawn = vectorised_draws.draw_bernoulli\n"
        "vectorised_draws.draw_bernoulli = lambda *a: print('by vectors') or drawn(*a)\n"
        "torch.empty(5000).bernoulli_(0.5)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "by vectors\n"


@pytest.mark.usefixtures("drawn_by_vectors")
def test_a_tensor_that_is_not_contiguous_is_drawn_as_before() -> None:
    own, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    drawn = torch.empty(70, 90).t().bernoulli_(0.3, generator=own)
    undo = vectorise_draws()
    undo()
    assert torch.equal(drawn, torch.empty(70, 90).t().bernoulli_(0.3, generator=other))


@pytest.mark.usefixtures("drawn_by_vectors")
def test_an_impossible_chance_is_pytorchs_own_error() -> None:
    with pytest.raises(RuntimeError, match="expects p to be in"):
        torch.empty(5000).bernoulli_(1.5)


def test_where_pytorch_draws_in_another_way_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    vectorised_draws._check_equal.cache_clear()
    monkeypatch.setattr(vectorised_draws, "draw_bernoulli", lambda tensor, p, generator: tensor.zero_())
    with pytest.raises(NativeError, match="in another way"):
        vectorise_draws()
    assert torch.empty(5000).bernoulli_(0.5).any()
