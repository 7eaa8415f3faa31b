"""Masks drawn at random, for tests that must hold for all of them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from flatout import masks
from flatout.blocks.kernels.attention.mask import Mask


def _graph(draw: st.DrawFn, queries: int, keys: int) -> Mask:
    per_row = [draw(st.lists(st.integers(0, keys - 1), max_size=4)) for _ in range(queries)]
    crow = torch.tensor([0, *(len(row) for row in per_row)]).cumsum(0)
    return masks.graph(crow, torch.tensor([c for row in per_row for c in row], dtype=torch.int64), num_keys=keys)


def _documents(draw: st.DrawFn, length: int) -> Mask:
    cuts = draw(st.lists(st.integers(0, length), max_size=4))
    return masks.documents([0, *sorted(cuts), length])


@st.composite
def leaves(draw: st.DrawFn, queries: int, keys: int) -> Mask:
    """One structure for that many queries and keys."""
    number = st.integers(0, max(queries, keys) + 2)
    kinds = [
        "causal",
        "window",
        "prefix",
        "sinks",
        "dilated",
        "blocks",
        "everything",
        "custom",
        "graph",
        "by head",
        "stacked",
    ]
    if queries == keys:
        kinds += ["documents", "ids", "sample ids", "tree", "global"]
    match draw(st.sampled_from(kinds)):
        case "causal":
            return masks.causal()
        case "window":
            return masks.window(draw(number), draw(st.none() | number))
        case "prefix":
            return masks.prefix(draw(number))
        case "sinks":
            return masks.sinks(torch.tensor([[draw(number)], [draw(number)]]))
        case "dilated":
            return masks.dilated(draw(st.integers(1, 4)))
        case "blocks":
            size = draw(st.integers(1, 9))
            rows, cols = -(-queries // size), -(-keys // size)
            flags = draw(st.lists(st.booleans(), min_size=rows * cols, max_size=rows * cols))
            return masks.blocks(torch.tensor(flags).view(rows, cols), size)
        case "custom":
            step = draw(st.integers(2, 9))
            return masks.custom(lambda b, h, q, kv: (q * 7 + kv * 3 + h) % step < 2, heads=3)
        case "graph":
            return _graph(draw, queries, keys)
        case "by head":
            return masks.window(torch.tensor([[draw(number) for _ in range(3)]]), None)
        case "stacked":
            return masks.per_head([masks.causal(), masks.window(draw(number)), masks.sinks(draw(number))])
        case "documents":
            return _documents(draw, queries)
        case "ids":
            return masks.documents(
                ids=torch.tensor(draw(st.lists(st.integers(0, 3), min_size=queries, max_size=queries)))
            )
        case "sample ids":
            rows = [sorted(draw(st.lists(st.integers(0, 3), min_size=queries, max_size=queries))) for _ in range(2)]
            return masks.documents(ids=torch.tensor(rows))
        case "tree":
            return masks.tree([draw(st.integers(-1, i - 1)) for i in range(queries)])
        case "global":
            return masks.global_tokens(torch.tensor(draw(st.lists(st.booleans(), min_size=queries, max_size=queries))))
    return masks.everything()


@st.composite
def compositions(draw: st.DrawFn, queries: int, keys: int, depth: int = 3) -> Mask:
    """Structures joined at random."""
    kind = draw(st.sampled_from(["leaf", "both", "either", "not"])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaves(queries, keys))
    one = draw(compositions(queries, keys, depth - 1))
    if kind == "not":
        return ~one
    two = draw(compositions(queries, keys, depth - 1))
    return one & two if kind == "both" else one | two
