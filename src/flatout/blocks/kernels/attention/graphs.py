"""Masks out of a tree or a graph: ancestors, neighbours."""

# S tokens, E edges

from __future__ import annotations

import torch
from torch import Tensor

from flatout.blocks.kernels.attention.mask import Bounds, Mask, MaskMod, Sizes, exact
from flatout.blocks.kernels.attention.sets import KeySets, covered, members_with, one_interval
from flatout.core.errors import UsageError

_WORTH = 64
"""Intervals a row, on average, above which a tree's ancestors are looked at block by block instead."""


class Tree(Mask):
    """Each token sees itself and its ancestors: `parents` (S,), -1 for a root.

    A token is an ancestor of another exactly if its visit in a depth-first walk encloses the other's: `enter` and `leave` are the
    times of the walk, so that two comparisons tell (Tarjan, Depth-first search and linear graph algorithms, 1972).
    """

    def __init__(self, parents: Tensor, enter: Tensor, leave: Tensor) -> None:
        super().__init__(f"tree({parents.numel()})", "tree")
        self.parents, self.enter, self.leave, self.num_tokens = parents, enter, leave, parents.numel()

    def mod(self) -> MaskMod:
        enter, leave = self.enter, self.leave
        return lambda b, h, q, kv: (enter[kv] <= enter[q]) & (enter[q] < leave[kv])

    def bounds(self, sizes: Sizes) -> Bounds:
        ancestor_runs = _ancestor_runs(self.parents.to(sizes.device))
        if ancestor_runs is None:
            return self._loosely(sizes)
        row, lo, hi = sizes.of_each_group(*ancestor_runs)
        return exact(covered(row, lo, hi, num_rows=sizes.num_rows, num_keys=sizes.keys))

    def _loosely(self, sizes: Sizes) -> Bounds:
        """Where ancestors are in very many pieces: itself for certain, perhaps all, or all before it where parents come first."""
        q = sizes.query
        last = q + 1 if bool((self.parents.to(sizes.device) < q).all()) else torch.full_like(q, sizes.keys)
        own, first, last = (sizes.of_each_row(t) for t in (q, torch.zeros_like(q), last))
        return Bounds(one_interval(own, own + 1, sizes.keys), one_interval(first, last, sizes.keys))

    def blocks(self, sizes: Sizes, block: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """The ancestors of a row of blocks together, each with the number of queries that it is one of: paths that meet go on as
        one, so that this takes the time of the ancestors of all rows of blocks, and not of all queries.
        """
        parents = self.parents.to(sizes.device)
        num, rows = parents.numel(), -(-sizes.queries // block)
        top = _tops(parents)
        row, at, times = sizes.query // block, sizes.query, torch.ones_like(sizes.query)
        found = []
        while row.numel():
            found.append((row, top[at], at + 1, times))
            above = parents[top[at]]
            row, above, times = row[above >= 0], above[above >= 0], times[above >= 0]
            code, which = (row * num + above).unique(return_inverse=True)
            times = torch.zeros_like(code).index_add_(0, which, times)
            row, at = code // num, code % num
        row, lo, hi, times = (torch.cat(parts) for parts in zip(*found, strict=True)) if found else (row, row, row, row)
        cols = -(-sizes.keys // block)
        touched = covered(row, lo // block, -(-hi // block), num_rows=rows, num_keys=cols)
        by_all = covered(row, lo, hi, num_rows=rows, num_keys=sizes.keys, times=times, at_least=block)
        full_row, full_lo, full_hi = by_all.listed()
        full_lo, full_hi = -(-full_lo // block), full_hi // block
        is_some = full_lo < full_hi
        return members_with(touched, KeySets(rows, cols, full_row[is_some], full_lo[is_some], full_hi[is_some]))


def tree_of(parents: Tensor) -> Tree:
    """Raises UsageError for parents out of range, and for tokens that are their own ancestors."""
    parents = parents.to(torch.int64)
    num = parents.numel()
    if parents.dim() != 1 or (num and not (int(parents.min()) >= -1 and int(parents.max()) < num)):
        raise UsageError(f"parents of shape {tuple(parents.shape)} must be (S,) numbers from -1 (a root) to S - 1")
    order, above = _roots_first(parents), parents.tolist()
    size = [1] * num
    for token in reversed(order):
        if above[token] >= 0:
            size[above[token]] += size[token]
    enter, free, root = [0] * num, [0] * num, 0  # free: when the token's next child, or the next root, can enter
    for token in order:
        parent = above[token]
        enter[token] = root if parent < 0 else free[parent]
        free[token] = enter[token] + 1
        if parent < 0:
            root += size[token]
        else:
            free[parent] += size[token]
    times = torch.tensor(enter, dtype=torch.int32), torch.tensor(size, dtype=torch.int32)
    return Tree(parents, times[0].to(parents.device), (times[0] + times[1]).to(parents.device))


def _roots_first(parents: Tensor) -> list[int]:
    """The tokens in an order in which parents come before their children; the given one if it is such."""
    num = parents.numel()
    if not num or bool((parents < torch.arange(num, device=parents.device)).all()):
        return list(range(num))
    depth, far = (parents >= 0).to(torch.int64), parents.clone()
    while bool((far >= 0).any()):  # by doubling: depth counts the steps to `far`
        step, has_far = far.clamp(min=0), far >= 0
        depth = depth + torch.where(has_far, depth[step], 0)
        far = torch.where(has_far, far[step], -1)
        if int(depth.max()) >= num:
            raise UsageError("a token is its own ancestor; parents must lead to a root, whose parent is -1")
    order: list[int] = depth.argsort(stable=True).tolist()
    return order


def _ancestor_runs(parents: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Each token with its ancestors, as (row, lo, hi): runs of tokens whose parent is the token before them count once."""
    num = parents.numel()
    index, top = torch.arange(num, device=parents.device), _tops(parents)
    row = at = index
    rows, los, his, total = [], [], [], 0
    while row.numel():
        rows.append(row)
        los.append(top[at])
        his.append(at + 1)
        total += row.numel()
        if total > _WORTH * num:
            return None
        at = parents[top[at]]
        row, at = row[at >= 0], at[at >= 0]
    return torch.cat(rows), torch.cat(los), torch.cat(his)


def _tops(parents: Tensor) -> Tensor:
    """Of each token the first of the run that it is in, in which each token's parent is the one before it."""
    index = torch.arange(parents.numel(), device=parents.device)
    is_top = parents != index - 1
    is_top[:1] = True
    return torch.where(is_top, index, -1).cummax(0).values


class Graph(Mask):
    """Each query sees its neighbours: `crow` (Q + 1,) and `col` (E,), sorted within each row, of a matrix in CSR form."""

    def __init__(self, crow: Tensor, col: Tensor, num_keys: int) -> None:
        num_rows = crow.numel() - 1
        super().__init__(f"graph({num_rows} rows, {col.numel()} edges)", "graph")
        self.col, self.num_rows, self.num_keys = col, num_rows, num_keys
        self.is_formula = False
        row = torch.arange(num_rows, device=crow.device).repeat_interleave(crow.diff(), output_size=col.numel())
        self._row, self._edges = row, row * num_keys + col

    def mod(self) -> MaskMod:
        edges, num_keys = self._edges, self.num_keys
        if not edges.numel():
            return lambda b, h, q, kv: (q < 0) & (kv < 0)

        def function(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            wanted = q * num_keys + kv
            found = torch.searchsorted(edges, wanted).clamp(max=edges.numel() - 1)
            return edges[found] == wanted

        return function

    def bounds(self, sizes: Sizes) -> Bounds:
        row, col = self._row.to(sizes.device), self.col.to(sizes.device)
        is_new = torch.ones_like(row, dtype=torch.bool)
        is_new[1:] = (row[1:] != row[:-1]) | (col[1:] != col[:-1] + 1)
        is_end = torch.ones_like(is_new)
        is_end[:-1] = is_new[1:]
        each = sizes.of_each_group(row[is_new], col[is_new], col[is_end] + 1)
        return exact(KeySets(sizes.num_rows, sizes.keys, *each))

    def check(self, queries: int, keys: int) -> None:
        if (queries, keys) != (self.num_rows, self.num_keys):
            raise UsageError(
                f"the graph is of {self.num_rows} queries and {self.num_keys} keys, and there are {queries} and {keys}"
            )


def graph_of(crow: Tensor, col: Tensor, num_keys: int | None) -> Graph:
    """Columns are sorted within their rows and told once. Raises UsageError for what is no CSR matrix."""
    crow, col = crow.to(torch.int64), col.to(torch.int64)
    num_rows = crow.numel() - 1
    num_keys = num_rows if num_keys is None else num_keys
    if num_rows < 0 or int(crow[0]) != 0 or int(crow[-1]) != col.numel() or bool((crow.diff() < 0).any()):
        raise UsageError(
            f"crow must rise from 0 to the number of columns given, {col.numel()}; it has {crow.numel()} numbers"
        )
    if col.numel() and not (int(col.min()) >= 0 and int(col.max()) < num_keys):
        raise UsageError(f"columns lie between {int(col.min())} and {int(col.max())}, and there are {num_keys} keys")
    row = torch.arange(num_rows, device=crow.device).repeat_interleave(crow.diff(), output_size=col.numel())
    edges = (row * num_keys + col).unique()
    row, col = edges // num_keys, edges % num_keys
    counts = torch.bincount(row, minlength=num_rows)
    return Graph(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), col, num_keys)
