from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.blocks.inference.decoding.cuda_graph import Graphed
from flatout.blocks.inference.decoding.loop import Decoder
from flatout.blocks.inference.decoding.static_cache import StaticCache
from flatout.core.errors import UsageError

needs_gpu = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


class Speaker(nn.Module):
    """A small language model that is called whole, or with a cache on what is new."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2, words: int = 50) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor, cache: StaticCache | None = None) -> Tensor:
        b, t = ids.shape
        at = torch.arange(t, device=ids.device) if cache is None else cache.places(t)
        x = self.words(ids) + self.places(at)
        for number, qkv in enumerate(self.qkv):
            q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in qkv(x).chunk(3, -1))
            if cache is None:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                y = F.scaled_dot_product_attention(q, *cache.write(number, k, v), attn_mask=cache.mask(t))
            x = x + y.transpose(1, 2).reshape(b, t, -1)
        return self.head(x)

    def cache(self, batch: int, max_len: int = 20, device: str = "cpu") -> StaticCache:
        return StaticCache(len(self.qkv), batch, self.heads, max_len, 8, dtype=torch.float32, device=device)


def speaker(device: str = "cpu") -> Speaker:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Speaker().to(device).eval()


@torch.no_grad()
def said(model: Speaker, ids: Tensor, num: int) -> Tensor:
    """Greedily, everything computed anew for each token."""
    begins = ids.shape[1]
    for _ in range(num):
        ids = torch.cat((ids, model(ids)[:, -1].argmax(-1, keepdim=True)), 1)
    return ids[:, begins:]


@pytest.mark.parametrize("device", DEVICES)
def test_decoding_says_what_the_whole_model_says(device: str) -> None:
    model = speaker(device)
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], device=device)
    wanted = said(model, ids, 12)
    cache = model.cache(2, device=device)

    def step(tokens: Tensor) -> Tensor:
        return model(tokens[:, None], cache)[:, -1].argmax(-1)

    decoder = Decoder(step, cache, batch=2)
    for _ in range(2):
        cache.reset()
        with torch.no_grad():
            first = model(ids, cache)[:, -1].argmax(-1)
        rest = decoder(first, num=11, length=5)
        assert torch.equal(torch.cat((first[:, None], rest), 1), wanted)
        assert int(cache.position) == 16
    assert decoder.graphed.is_captured is (device == "cuda")


def test_a_prompt_in_the_cache_stays_when_a_decoder_is_made() -> None:
    model, ids = speaker(), torch.tensor([[3, 1, 4]])
    cache = model.cache(1)
    with torch.no_grad():
        first = model(ids, cache)[:, -1].argmax(-1)
    cache.advance(3)

    def step(tokens: Tensor) -> Tensor:
        return model(tokens[:, None], cache)[:, -1].argmax(-1)

    assert torch.equal(Decoder(step, cache, batch=1)(first, num=4, length=3), said(model, ids, 5)[:, 1:])


def test_there_must_be_room_for_what_is_said() -> None:
    cache = StaticCache(1, 1, 1, 8, 4, device="cpu")
    decoder = Decoder(lambda tokens: tokens + 1, cache, batch=1)
    assert decoder(torch.tensor([5]), num=8, length=0).tolist() == [[6, 7, 8, 9, 10, 11, 12, 13]]
    for num, length in ((9, 0), (1, 8), (0, 0), (1, -1)):
        with pytest.raises(UsageError, match="make a longer cache"):
            decoder(torch.tensor([5]), num=num, length=length)
    with pytest.raises(UsageError, match="size below 1"):
        StaticCache(1, 0, 1, 8, 4, device="cpu")


def test_the_cache_is_as_large_as_it_says() -> None:
    cache = StaticCache(3, 2, 4, 8, 16, dtype=torch.bfloat16, device="cpu")
    assert cache.num_bytes == 2 * 3 * 2 * 4 * 8 * 16 * 2
    cache.advance(2)
    assert cache.mask(2).tolist() == [[True] * 3 + [False] * 5, [True] * 4 + [False] * 4]
    assert cache.places(2).tolist() == [2, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_a_graphed_step_is_the_step(device: str) -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(device)
    count = torch.zeros(1, device=device)

    def step(pair: dict[str, Tensor], scale: float) -> tuple[Tensor, Tensor]:
        count.add_(1)
        return (pair["a"] @ weight).relu() * scale, pair["b"] + count

    example = {"a": torch.ones(2, 8, device=device), "b": torch.zeros(1, device=device)}
    graphed = Graphed(step, (example, 2.0), state=(count,))
    assert count.item() == 0
    for number in range(1, 4):
        given = {"a": torch.randn(2, 8, device=device), "b": torch.ones(1, device=device)}
        made = graphed(given, 2.0)
        torch.testing.assert_close(made[0], (given["a"] @ weight).relu() * 2)
        assert made[1].item() == 1 + number
    assert graphed.is_captured is (device == "cuda") and str(graphed)
    for args, says in (
        (({**example, "a": torch.ones(3, 8, device=device)}, 2.0), "capture anew"),
        ((example, 3.0), "was 2.0 at capture"),
        ((example,), "nested otherwise"),
        (({**example, "a": 1.0}, 2.0), "an input is 1.0"),
    ):
        with pytest.raises(UsageError, match=says):
            graphed(*args)


def test_on_a_cpu_it_says_that_the_plain_function_runs() -> None:
    graphed = Graphed(lambda x: x + 1, (torch.ones(2),))
    assert not graphed.is_captured and "no CUDA graphs on 'cpu'" in graphed.why_not and str(graphed) == graphed.why_not


other = torch.zeros(3)


def _branches(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def _changes(x: Tensor) -> Tensor:
    other.view(3, 1)[0].add_(1)
    return x


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda x: x * x.max().item(), "reads a number"),
        (_branches, "reads a number"),
        (lambda x: x[x > 0], "size of its result depends"),
        (lambda x: x.nonzero(), "size of its result depends"),
        (lambda x: torch.masked_select(x, x > 0), "size of its result depends"),
        (lambda x: x if torch.equal(x, x + 1) else x + 2, "two tensors are equal"),
        (_changes, "not named in `state`"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_with_its_line(step: Any, says: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be captured: .*{says}.*test_decoding.py:"):
        Graphed(step, (torch.ones(3),))


def test_what_a_step_makes_and_changes_itself_is_its_own() -> None:
    def step(x: Tensor) -> Tensor:
        y = torch.zeros(3)
        y.view(3)[1:].add_(x[1:])
        x.mul_(2)
        return y

    assert Graphed(step, (torch.ones(3),))(torch.ones(3)).tolist() == [0, 1, 1]


def test_inputs_lie_on_one_device() -> None:
    with pytest.raises(UsageError, match="one at least"):
        Graphed(lambda x: x, (1.0,))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.long
def test_a_compiled_step_says_the_same() -> None:
    model, ids = speaker(), torch.tensor([[3, 1, 4]])
    cache = model.cache(1)
    with torch.no_grad():
        first = model(ids, cache)[:, -1].argmax(-1)

    def step(tokens: Tensor) -> Tensor:
        return model(tokens[:, None], cache)[:, -1].argmax(-1)

    torch.compiler.reset()
    assert torch.equal(
        Decoder(step, cache, batch=1, compile="default")(first, num=4, length=3), said(model, ids, 5)[:, 1:]
    )
    part = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(Decoder(part, cache, batch=1)(first, num=4, length=3), said(model, ids, 5)[:, 1:])
