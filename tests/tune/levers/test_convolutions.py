"""What levers on convolutions share."""

from __future__ import annotations

import pytest
from tests.lever_tools import ran
from torch import nn

from flatout.core.errors import EditError
from flatout.core.records.lever import Lever
from flatout.tune.levers.graph import pad_channels, pointwise_convolution


@pytest.mark.parametrize(
    ("lever", "block"),
    [
        (pointwise_convolution.LEVER, "pointwise_convolutions_as_products"),
        (pad_channels.LEVER, "pad_few_channels"),
    ],
)
def test_one_line_is_written_behind_the_model(lever: Lever, block: str) -> None:
    text = (
        "import torch\nfrom torch import nn\n\nnet = nn.Sequential(nn.Conv2d(3, 4, 1))\n"
        "torch.optim.SGD(net.parameters(), lr=0.1)\ny = net(torch.ones(1, 3, 2, 2))\n"
    )
    assert lever.edit is not None
    new = lever.edit(text, {})
    assert f"nn.Conv2d(3, 4, 1))\n{block}(net)\n" in new
    assert type(ran(new)["net"][0]) is not nn.Conv2d
    with pytest.raises(EditError, match="already"):
        lever.edit(new, {})
