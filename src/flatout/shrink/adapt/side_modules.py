"""What stands beside a module and works through its hooks: bottlenecks, prompts, prefixes.

Each is a `AdapterParts` child of the module, so that it moves, saves and copies with it; its hook is a method of that child.

Legend: B batch, T tokens, P learned vectors, C channels, R the bottleneck's width.
"""

from __future__ import annotations

import math
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.core.errors import UsageError
from flatout.shrink.adapt.low_rank import AdapterParts
from flatout.shrink.adapt.widths import Width

_CONVOLUTION: Final = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class BottleneckLayer(nn.Module):
    """`y + up(relu(down(y)))`; `up` starts as zero."""

    def __init__(self, like: Tensor, width: Width, inner: int, *, generator: torch.Generator) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width.channels)
        drawn = torch.rand(inner, width.channels, generator=generator) * (2 * bound) - bound
        self.width = width
        self.down, self.down_bias = nn.Parameter(drawn.to(like)), nn.Parameter(like.new_zeros(inner))
        self.up = nn.Parameter(like.new_zeros(width.channels, inner))
        self.up_bias = nn.Parameter(like.new_zeros(width.channels))

    def forward(self, y: Tensor) -> Tensor:
        num_spatial = y.dim() - 2 if self.width.num_spatial is None else self.width.num_spatial
        if y.shape[-1 - num_spatial] != self.width.channels:
            raise UsageError(
                f"a bottleneck for {self.width.channels} channels got {list(y.shape)}; put it after the layer itself"
            )
        if num_spatial == 0:
            return y + F.linear(F.relu(F.linear(y, self.down, self.down_bias)), self.up, self.up_bias)
        run, ones = _CONVOLUTION[num_spatial], (1,) * num_spatial
        inner = F.relu(run(y, self.down.view(*self.down.shape, *ones), self.down_bias))
        return y + run(inner, self.up.view(*self.up.shape, *ones), self.up_bias)


class OutputParts(AdapterParts):
    """Parts that change a module's output: bottlenecks, prompts behind it, and what removes one; of a tuple the first tensor."""

    def hook(self, host: nn.Module) -> None:
        host.register_forward_hook(self.after)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        part = self.part()
        if part is None:
            return None
        if isinstance(output, tuple):
            return (part(output[0]), *output[1:])
        return part(output)


class PromptVectors(nn.Module):
    """Learned vectors [P, C]; `num_tokens` is what stood behind them in the last call."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.vectors = nn.Parameter(vectors)
        self.num_tokens: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 3 or x.shape[2] != self.vectors.shape[1]:
            raise UsageError(
                f"a prompt of {self.vectors.shape[1]} channels got {list(x.shape)}; it stands in front of [B, T, C]"
            )
        self.num_tokens = x.shape[1]
        return torch.cat((self.vectors.to(x.dtype).expand(x.shape[0], -1, -1), x), 1)


class InputParts(AdapterParts):
    """Prompts before a module's first input."""

    def hook(self, host: nn.Module) -> None:
        host.register_forward_pre_hook(self.before)

    def before(self, module: nn.Module, args: Any) -> Any:
        part = self.part()
        return None if part is None else (part(args[0]), *args[1:])


class PromptCut(nn.Module):
    """Takes the vectors of a prompt off [B, P + T, ...] again."""

    def __init__(self, path: str, prompt: PromptVectors) -> None:
        super().__init__()
        self.path = path
        self.__dict__["prompt"] = prompt  # no child: it belongs to the module that it stands at

    def forward(self, y: Tensor) -> Tensor:
        prompt = cast(PromptVectors, self.__dict__["prompt"])
        num = prompt.vectors.shape[0]
        if prompt.num_tokens is None or y.dim() < 2 or y.shape[1] != num + prompt.num_tokens:
            raise UsageError(
                f"the output {list(y.shape)} of '{self.path or 'the model'}' has no {num} prompt vectors in front of its tokens; "
                "name in `cut` a module that keeps [B, T, ...], or set is_cut=False"
            )
        return y[:, num:]


class PrefixVectors(nn.Module):
    """Vectors in front of what the key and the value projections of an attention get: P further keys and values."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = nn.Parameter(keys), nn.Parameter(values)


_ARGUMENTS: Final = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights")


class PrefixParts(AdapterParts):
    """Prefixes of nn.MultiheadAttention. Attention weights, where asked for, have P more columns, the first ones."""

    def hook(self, host: nn.Module) -> None:
        host.register_forward_pre_hook(self.before, with_kwargs=True)

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        part = cast(PrefixVectors | None, self.part())
        if part is None:
            return None
        arguments = {**dict(zip((*_ARGUMENTS, "is_causal"), args, strict=False)), **kwargs}
        is_first = cast(nn.MultiheadAttention, module).batch_first
        arguments["key"] = _prepended(part.keys, arguments["key"], is_first)
        arguments["value"] = _prepended(part.values, arguments["value"], is_first)
        num = part.keys.shape[0]
        if arguments.get("attn_mask") is not None:
            arguments["attn_mask"] = F.pad(arguments["attn_mask"], (num, 0))  # zero, False: may be seen
            arguments["is_causal"] = False  # what the mask says holds; a causal kernel would count the prefix as tokens
        if arguments.get("key_padding_mask") is not None:
            arguments["key_padding_mask"] = F.pad(arguments["key_padding_mask"], (num, 0))
        return (), arguments


def _prepended(vectors: Tensor, x: Tensor, is_batch_first: bool) -> Tensor:
    vectors = vectors.to(x.dtype)
    if x.dim() == 2:
        return torch.cat((vectors, x))
    if is_batch_first:
        return torch.cat((vectors.expand(x.shape[0], -1, -1), x), 1)
    return torch.cat((vectors[:, None].expand(-1, x.shape[1], -1), x))
