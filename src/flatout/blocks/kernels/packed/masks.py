"""Whether a mask in a graph hides the padding and nothing else: what computes it is run on batches of many patterns."""

# B rows of a batch, T positions

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_aggregate

from flatout.blocks.kernels.attention.recognition import HIDDEN

Visible = Literal["all", "before"]
"""Real tokens see all real ones of their row, or those up to their own place."""
_MOST_NODES: Final = 200
_LARGE: Final = 1 << 26
_COMPARISONS: Final = frozenset(
    ["eq", "ne", "lt", "le", "gt", "ge", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "bool"]
)
_AS_THEY_ARE: Final = frozenset(["unsqueeze", "getitem", "view", "reshape", "expand", "detach", "contiguous", "clone"])
"""Whose results are the same tokens."""
_SIZES: Final = frozenset(
    ["zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "size", "dim"]
)
"""Which read no numbers."""


def visible_under_mask(
    mask: fx.Node, known: Mapping[fx.Node, Literal["tokens", "is real"]], *, pad: int, shape: tuple[int, int]
) -> Visible | None:
    """What real tokens see under a mask that is added or is yes or no; None where that is not certain.

    `known` are the inputs that a mask may be made of: the tokens, and masks that are 1 where these are not `pad`, else 0. `shape`
    is that of the tokens, [B, T]. The mask must come from them alone: any other tensor, or a random number, makes it uncertain,
    and so does anything that is computed of tokens but comparisons with numbers. The numbers and their neighbours are tried.
    """
    part = _subgraph(mask, known)
    if part is None:
        return None
    found: set[Visible | None] = set()
    devices = {v.device for node in part.inputs if isinstance(v := node.meta.get("example_value"), Tensor)}
    gpus = [device for device in devices if device.type == "cuda"]
    with torch.no_grad(), unset_fake_temporarily(), torch.random.fork_rng(gpus):
        before = _random_states(gpus)
        for is_real in _patterns(*shape):
            for tokens in _tokens(is_real, part.numbers, pad):
                try:
                    value = part.run(*(_input(node, known, is_real, tokens) for node in part.inputs))
                except Exception:  # noqa: BLE001 - whatever it is, the mask is not understood
                    return None
                found.add(_visible_tokens(value, is_real))
        has_drawn = any(not torch.equal(one, other) for one, other in zip(before, _random_states(gpus), strict=True))
    return found.pop() if len(found) == 1 and not has_drawn else None


def bare_name(node: fx.Node) -> str:
    """The name of the function or method that a node calls, "eq" for `Tensor.__eq__`, too; torch 2.11 writes such."""
    if node.op == "call_method":
        name = str(node.target)
    else:
        name = str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else ""
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _random_states(gpus: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus)]


class _MaskCode:
    """The nodes that compute a mask, as a module of its own."""

    def __init__(self, graph: fx.Graph, inputs: list[fx.Node]) -> None:
        self.inputs, self.numbers = inputs, _numbers(graph)
        self._module = fx.GraphModule(torch.nn.Module(), graph)

    def run(self, *values: Any) -> Any:
        return self._module(*values)


def _numbers(graph: fx.Graph) -> set[int]:
    """The whole numbers that are written in a graph, and their neighbours."""
    found: set[int] = set()

    def note(argument: Any) -> Any:
        if isinstance(argument, (int, float)) and not isinstance(argument, bool) and float(argument).is_integer():
            found.update(range(int(argument) - 1, int(argument) + 2))
        return argument

    for node in graph.nodes:
        map_aggregate((node.args, node.kwargs), note)
    return found


def _subgraph(mask: fx.Node, known: Mapping[fx.Node, Any]) -> _MaskCode | None:
    needed: set[fx.Node] = set()
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        if node in needed:
            continue
        needed.add(node)
        if node in known or _is_size(node):
            continue
        if node.op not in ("call_function", "call_method") or len(needed) > _MOST_NODES:
            return None
        waiting += node.all_input_nodes
    if not _compares_tokens_alone(mask, needed, known):
        return None
    graph, inputs, copies = fx.Graph(), [], {}
    for node in mask.graph.nodes:
        if node not in needed:
            continue
        if node in known or _is_size(node):
            inputs.append(node)
            copies[node] = graph.placeholder(node.name)
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(copies[mask])
    return _MaskCode(graph, inputs)


def _compares_tokens_alone(mask: fx.Node, needed: set[fx.Node], known: Mapping[fx.Node, Any]) -> bool:
    """Whether all that is computed of tokens are comparisons with numbers, so that few tokens stand for all."""
    tokens = {node for node, what in known.items() if what == "tokens"}
    for node in mask.graph.nodes:
        if node not in needed or node in known or not tokens.intersection(node.all_input_nodes):
            continue
        name = bare_name(node)
        others = [a for a in (*node.args, *node.kwargs.values()) if a not in tokens]
        if name in _AS_THEY_ARE:
            tokens.add(node)
        elif name not in _SIZES and not (name in _COMPARISONS and all(isinstance(a, (int, float)) for a in others)):
            return False
    return mask not in tokens


def _is_size(node: fx.Node) -> bool:
    """Whether it is a length that a compiled graph takes for a variable."""
    return node.op == "placeholder" and isinstance(node.meta.get("example_value"), (int, torch.SymInt))


def _tokens(is_real: Tensor, numbers: set[int], pad: int) -> Iterator[Tensor]:
    """Tokens that are real where they shall be: those that the graph names, in several orders."""
    largest = torch.iinfo(torch.int32).max
    named = sorted({*range(pad + 1, pad + 8), *(n for n in numbers if 0 <= n <= largest)} - {pad})
    place = torch.arange(is_real.numel()).view_as(is_real)
    for start in range(0, len(named), max(1, is_real.numel() // 2)):
        tokens = torch.tensor(named)[(start + place) % len(named)]
        yield tokens.masked_fill(~is_real, pad)


def _input(node: fx.Node, known: Mapping[fx.Node, str], is_real: Tensor, tokens: Tensor) -> Any:
    value = node.meta.get("example_value")
    if node not in known:
        return value if isinstance(value, int) else value.node.hint  # type: ignore[union-attr]
    assert isinstance(value, Tensor)
    if known[node] == "is real":
        return is_real.to(value.device, value.dtype)
    return tokens.to(value.device, value.dtype)


def _patterns(rows: int, width: int) -> Iterator[Tensor]:
    """[B, T], yes for a real token: padding behind, before, between and nowhere. Fewer where a mask of all pairs is large."""
    place, row = torch.arange(width), torch.arange(rows)[:, None]
    yield torch.ones(rows, width, dtype=torch.bool)
    for number in range(3 if rows * width**2 <= _LARGE else 1):
        length = 1 + (row * 7 + number * 5 + width // 2) % width
        yield place < length
        yield place >= width - length
        yield ((place * (3 + number) + row) % 5 < 3) | (place == number % width)


def _visible_tokens(value: Any, is_real: Tensor) -> Visible | None:
    """What a mask shows to real tokens, by all pairs of them and of keys; None where that is something else."""
    rows, width = is_real.shape
    if not isinstance(value, Tensor) or not 2 <= value.dim() <= 4:
        return None
    mask, is_real = value[(None,) * (4 - value.dim())], is_real.to(value.device)
    queries = mask.size(2)  # 1 where the mask is the same for all
    if mask.size(0) not in (1, rows) or queries not in (1, width) or mask.size(3) not in (1, width):
        return None
    is_hidden = ~mask if mask.dtype == torch.bool else mask <= HIDDEN
    if mask.dtype != torch.bool and bool((mask[~is_hidden] != 0).any()):
        return None
    is_padding = ~is_real[:, None, None, :]
    if queries == 1:
        return "all" if bool((is_hidden == is_padding).all()) else None
    is_later = torch.ones(width, width, dtype=torch.bool, device=value.device).triu(1)
    is_asked = is_real[:, None, :, None]
    for visible, wanted in (("all", is_padding), ("before", is_padding | is_later)):
        if bool(((is_hidden == wanted) | ~is_asked).all()):
            return visible  # type: ignore[return-value]
    return None
