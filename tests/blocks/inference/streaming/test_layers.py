from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plain_models import Block
from torch import Tensor, nn

from flatout.blocks.inference.streaming.layers import StreamedLayers, stream_layers
from flatout.blocks.inference.streaming.transit import rounded_in_transit
from flatout.core.errors import CheckpointError, UsageError

on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
WIDTH = 64


def stack(num: int = 6, *, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.ModuleList(Block(width, 4) for _ in range(num)).to(dtype).eval()


def tokens(batch: int = 2, *, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 5, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@torch.no_grad()
def plain(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def layer_bytes(layers: nn.ModuleList) -> int:
    return sum(p.nbytes for p in layers[0].parameters())


def limited(layers: nn.ModuleList, num: float, **options: Any) -> StreamedLayers:
    """With room for so many layers and the bytes that places are rounded up to."""
    return stream_layers(layers, "cpu", resident_bytes=int(layer_bytes(layers) * num) + 65536, **options)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("source", ["pinned", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_as_is_are_those_of_the_plain_layers_bit_for_bit(
    ahead: int, source: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    layers, x = stack(dtype=dtype), tokens(dtype=dtype)
    wanted, before = plain(layers, x), [p.clone() for p in layers.parameters()]
    streamed = limited(layers, ahead + 2, ahead=ahead, source=source, folder=tmp_path if source == "disk" else None)
    with streamed:
        assert streamed.streamed and len(streamed.streamed) < 6
        for _ in range(3):
            assert torch.equal(streamed(x), wanted)
        assert torch.equal(plain(layers, x), wanted), "in a loop of one's own"
    assert all(torch.equal(a, b) for a, b in zip(layers.parameters(), before, strict=True))
    assert torch.equal(plain(layers, x), wanted)
    streamed.undo()


@pytest.mark.slow
@pytest.mark.parametrize("transit", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("source", ["pinned", "disk"])
def test_packed_weights_are_rounded_as_stated_and_the_others_are_not(transit: Any, source: str, tmp_path: Path) -> None:
    layers, x, group = stack(), tokens(), 32
    before = [p.clone() for p in layers.parameters()]
    options = {"source": source, "folder": tmp_path if source == "disk" else None}
    streamed = limited(layers, 3, transit=transit, group=group, **options)
    assert 0 < len(streamed.streamed) < 6
    exact = stack().double()
    for i in streamed.streamed:
        for (_, weight), (_, wide) in zip(stack()[i].named_parameters(), exact[i].named_parameters(), strict=True):
            wide.data = rounded_in_transit(weight, transit, group=group).double()
    wanted = plain(exact, x.double())
    made = streamed(x)
    assert torch.equal(streamed(x), made)
    error = float((made.double() - wanted).norm() / wanted.norm())
    lost = float((plain(stack().double(), x.double()) - wanted).norm() / wanted.norm())
    assert error < 1e-6 < lost < 0.2, "the rounding of the weights, and float32's own, and nothing else"
    streamed.undo()
    assert all(torch.equal(a, b) for a, b in zip(layers.parameters(), before, strict=True))


def test_packed_weights_say_what_travels_as_it_is() -> None:
    with limited(stack(), 2, transit="int4", group=32) as streamed:
        assert set(streamed.sent_as) == {"as-is", "int4"}
        parts = {part.name: part for part in streamed.layers[0].plan.parts}
        assert parts["norm_a.weight"].why == "it has 1 dimensions, and scales are for the rows of two"
        assert parts["qkv.weight"].bits == 4 and not parts["qkv.weight"].why


def test_streamed_layers_lie_evenly_between_those_that_stay() -> None:
    layers = stack(8)
    with limited(layers, 6) as streamed:
        assert streamed.streamed == (0, 2, 4, 6) or len(streamed.streamed) == 4
        assert [a - b for a, b in zip(streamed.streamed[1:], streamed.streamed, strict=False)] == [2, 2, 2]
        assert streamed.device_bytes <= 6 * layer_bytes(layers) + 65536


def test_with_room_for_all_nothing_is_streamed() -> None:
    layers, x = stack(3), tokens()
    wanted = plain(layers, x)
    with stream_layers(layers, "cpu") as streamed:
        assert not streamed.streamed and torch.equal(streamed(x), wanted) and streamed.bytes_in == 0
        assert streamed.predict(x, seconds=0.02).copy_s == 0


def test_a_pass_sends_each_streamed_layer_once() -> None:
    layers, x = stack(), tokens()
    with limited(layers, 2) as streamed:
        streamed(x)
        before = streamed.bytes_in
        for _ in range(5):
            streamed(x)
        assert streamed.bytes_in - before == 5 * streamed.sent_bytes


def test_layers_in_another_order_are_right_too() -> None:
    layers, x = stack(), tokens()
    with torch.no_grad():
        wanted = layers[1](layers[4](layers[4](layers[5](x))))
        with limited(layers, 2) as streamed:
            assert len(streamed.streamed) == 6
            assert torch.equal(layers[1](layers[4](layers[4](layers[5](x)))), wanted)


def test_a_changed_weight_is_seen_where_it_travels_as_it_is_and_refused_where_it_was_packed() -> None:
    x = tokens()
    for transit in ("as-is", "bf16"):
        layers, other = stack(), stack()
        with torch.no_grad():
            other[0].norm_a.weight.mul_(3)
        wanted = plain(other, x)
        with limited(layers, 2, transit=transit) as streamed, torch.no_grad():
            streamed(x)
            layers[0].norm_a.weight.mul_(3)
            if transit == "as-is":
                assert torch.equal(streamed(x), wanted)
            else:
                with pytest.raises(UsageError, match="stream anew"):
                    streamed(x)


def test_an_error_in_a_layer_leaves_the_ring_in_order() -> None:
    layers, x = stack(), tokens()
    wanted = plain(layers, x)
    with limited(layers, 2) as streamed:
        for _ in range(3):
            with pytest.raises(RuntimeError):
                streamed(torch.ones(2, 5, WIDTH + 1))
        assert torch.equal(streamed(x), wanted)


def test_the_prediction_is_there_before_and_checked_after() -> None:
    layers, x = stack(), tokens()
    with limited(layers, 3) as streamed:
        assert streamed.measured(x, seconds=0.02).bound_fraction is None
        before = streamed.predict(x, seconds=0.1)
        after = streamed.measured(x, seconds=0.1)
        assert streamed.prediction == before and before.sent_bytes == streamed.sent_bytes
        assert before.bound_s == max(before.copy_s, before.compute_s) <= before.pass_s
        assert before.exposed_s == before.pass_s - before.bound_s
        assert after.error_fraction == after.pass_s / before.pass_s - 1
        assert torch.equal(streamed(x), plain(stack(), x)), "measuring changes nothing"


def test_gradients_are_refused() -> None:
    layers, x = stack(), tokens()
    with limited(layers, 2), pytest.raises(UsageError, match="would record gradients"):
        layers[0](x)


def test_it_runs_in_inference_mode() -> None:
    layers, x = stack(), tokens()
    wanted = plain(layers, x)
    with limited(layers, 2) as streamed, torch.inference_mode():
        assert torch.equal(streamed(x), wanted)


def test_what_cannot_be_streamed_is_said(tmp_path: Path) -> None:
    shared = Block(WIDTH, 4)
    tied = [nn.Linear(4, 4), nn.Linear(4, 4)]
    tied[1].weight = tied[0].weight
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([shared, shared], {}, "share no module"),
        (tied, {}, "share no weight"),
        ([nn.GRU(4, 4)], {}, "list of its own"),
        ([], {}, "0 layers"),
        (stack(2), {"transit": "int2"}, "transit 'int2'"),
        (stack(2), {"ahead": -1}, "ahead -1"),
        (stack(2), {"source": "disk"}, "needs one"),
        (stack(2), {"folder": tmp_path}, "is for source 'disk'"),
        (stack(2), {"resident_bytes": 1000}, "do not hold"),
    ]
    for layers, options, says in cases:
        with pytest.raises(UsageError, match=says):
            stream_layers(layers, "cpu", **options)
    layers = stack(2)
    with limited(layers, 2.5, ahead=0) as streamed, torch.no_grad():
        if streamed.streamed:
            with pytest.raises(UsageError, match="streamed already"):
                stream_layers(layers, "cpu", resident_bytes=10**9)


def test_a_file_that_is_cut_is_said(tmp_path: Path) -> None:
    layers, x = stack(), tokens()
    streamed = limited(layers, 2, source="disk", folder=tmp_path)
    file = sorted(tmp_path.iterdir())[2]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="ends after"):
        streamed(x)
    file.write_bytes(whole)
    assert torch.equal(streamed(x), plain(stack(), x))
    streamed.undo()


def test_after_undo_it_says_so() -> None:
    streamed = limited(stack(), 2)
    streamed.undo()
    with pytest.raises(UsageError, match="no longer streamed"):
        streamed.predict(tokens())


@on_device
@pytest.mark.device
@pytest.mark.parametrize("transit", ["as-is", "int4", "int8", "bf16"])
@pytest.mark.parametrize("source", ["pinned", "disk"])
def test_on_a_device_it_is_what_it_is_here(transit: Any, source: str, tmp_path: Path) -> None:
    layers, x = stack(width=256), tokens(width=256).cuda()
    exact = stack(width=256)
    limit = 3 * layer_bytes(layers)
    folder = tmp_path if source == "disk" else None
    streamed = stream_layers(layers, resident_bytes=limit, transit=transit, source=source, folder=folder)  # type: ignore[arg-type]
    for i in streamed.streamed:
        for weight in exact[i].parameters():
            weight.data = rounded_in_transit(weight, transit, group=128)
    exact.cuda()
    wanted = plain(exact, x)
    for _ in range(4):
        assert torch.equal(streamed(x), wanted)
    before = torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved()
    streamed(x)
    assert before == (torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved())
    streamed.undo()
