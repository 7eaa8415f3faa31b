"""A rolling encoder: equal to the windowed one with one layer, another function with more, and native all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatout.blocks.inference.rolling_encoder import RollingEncoder, rolling_difference
from flatout.core.errors import UsageError


def _encoder(layers: int, *, norm_first: bool = False, batch_first: bool = True) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    return nn.TransformerEncoder(one, layers, norm=nn.LayerNorm(16), enable_nested_tensor=False)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_with_one_layer_it_is_the_windowed_encoder(norm_first: bool, batch_first: bool) -> None:
    found = rolling_difference(
        _encoder(1, norm_first=norm_first, batch_first=batch_first), torch.randn(40, 16), window=8
    )
    assert found.largest < 1e-5


def test_with_two_layers_it_is_another_function_and_the_difference_is_told() -> None:
    found = rolling_difference(_encoder(2), torch.randn(40, 16), window=8)
    assert 1e-3 < found.rms < found.largest < 1.0


def test_before_the_window_is_full_only_what_came_is_seen() -> None:
    encoder = _encoder(1).eval()
    rolling = RollingEncoder(encoder, window=8).eval()
    events, state = torch.randn(3, 16), list(rolling.example_inputs[1:])
    with torch.no_grad():
        for t in range(3):
            y, *state = rolling(events[t][None, None], *state)
            assert torch.allclose(y[0, 0], encoder(events[None, : t + 1])[0, -1], atol=1e-5)


def test_layers_of_another_kind_and_windows_of_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="window is 0"):
        RollingEncoder(_encoder(1), window=0)
    encoder = _encoder(1)
    encoder.layers[0] = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="layer 0 is a Identity"):
        RollingEncoder(encoder, window=4)
    with pytest.raises(UsageError, match="at least the window, 8"):
        rolling_difference(_encoder(1), torch.randn(4, 16), window=8)
