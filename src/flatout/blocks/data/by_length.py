"""A model called on the rows of a padded batch in groups of like length, each as wide as its own longest row.

B rows of a batch, T positions of its tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from flatout.core.errors import UsageError
from flatout.core.tensors.nests import tree_flatten, tree_unflatten

_TOKENS: Final = (torch.int64, torch.int32)
_FEWEST_ROWS: Final = 2
"""Of a group."""


def call_by_length(
    model: Callable[..., Any], *inputs: Any, pad: int, groups: int = 4, multiple: int = 8, **keywords: Any
) -> Any:
    """`model(*inputs, **keywords)` for padded tokens, with little of the arithmetic spent on padding.

    The rows are sorted by length and divided into `groups` of equally many; the model is called once for each, on its rows alone
    and cut to the group's longest row, rounded up to a `multiple`. The results come in the order of the rows, and as wide as the
    tokens were, with zeros behind each group's width. Data, their order and the batch of the loss stay the same; sums come in
    another order, and random masks (dropout) are other numbers of the same distribution.

    Args:
        model: computes each row by itself: no statistics over the batch, no loss of its own. Attention must mask the padding.
        inputs: tensors for the model; the first int64 or int32 one of two dimensions is the tokens, (B, T). Of others (B, T, ...)
            rows and positions are taken, of masks (B, 1, T, T) both their last dimensions, of other tensors with B rows these.
        pad: the token that fills rows up.
        groups: how many groups there are at most; each has two rows at least.
        multiple: widths are multiples of it, so that few shapes exist.
        keywords: more inputs, by name.

    Returns:
        What the model returns: tensors with B rows, alone or in tuples, lists, dicts and classes of results.

    Raises:
        UsageError: where there are no tokens, `groups` or `multiple` is below 1, or the model returns a tensor that has no rows.

    >>> embed = torch.nn.EmbeddingBag(5, 2, mode="sum", padding_idx=0)
    >>> tokens = torch.tensor([[1, 2, 3, 4], [2, 0, 0, 0], [3, 1, 2, 0], [4, 0, 0, 0]])
    >>> torch.allclose(call_by_length(embed, tokens, pad=0, groups=2, multiple=1), embed(tokens))
    True
    """
    if groups < 1 or multiple < 1:
        raise UsageError(f"groups is {groups} and multiple is {multiple}; both must be at least 1")
    leaves, shape = tree_flatten((inputs, keywords))
    tokens = next((leaf for leaf in leaves if is_tokens(leaf)), None)
    if tokens is None:
        raise UsageError("no tensor of integers (B, T) is among the inputs; give tokens, or call the model as it is")
    num_rows, width = tokens.shape
    ordered, order = row_lengths(tokens, pad).sort(stable=True)
    ends = _ends(num_rows, max(1, min(groups, num_rows // _FEWEST_ROWS)))
    longest = ordered[torch.tensor(ends, device=ordered.device) - 1].tolist()  # one read for all groups
    widths = [min(width, -(-max(1, length) // multiple) * multiple) for length in longest]
    if len(ends) == 1 or min(widths) == width:
        return model(*inputs, **keywords)
    if len(set(widths)) == 1:
        # Of results as wide as every group nobody could tell whether they go with the positions: two groups of two widths.
        ends, widths = _ends(num_rows, 2), [widths[0], min(width, widths[0] + multiple)]
    parts = []
    for start, end, own in zip([0, *ends], ends, widths, strict=False):
        rows = order[start:end]
        taken = [_cut(_rows_of(leaf, num_rows, rows), (end - start, width), own) for leaf in leaves]
        args, named = tree_unflatten(taken, shape)
        parts.append(model(*args, **named))
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return _joined(parts, sizes, widths, width, order.argsort())


def is_tokens(value: object) -> bool:
    """Whether it is a tensor of integers (B, T)."""
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in _TOKENS


def row_lengths(tokens: Tensor, pad: int) -> Tensor:
    """Positions of each row (B,) up to the last one that is not `pad`, on the tokens' device."""
    places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    return ((tokens != pad) * places).amax(dim=1)


def _ends(num_rows: int, num_groups: int) -> list[int]:
    """Where each group ends: as many rows in each, but for the first ones that take one more where they do not divide evenly."""
    least, more = divmod(num_rows, num_groups)
    return [least * number + min(number, more) for number in range(1, num_groups + 1)]


def _rows_of(leaf: Any, num_rows: int, rows: Tensor) -> Any:
    """These rows of an input that has as many as the batch; another as it is."""
    if isinstance(leaf, Tensor) and leaf.dim() >= 1 and leaf.shape[0] == num_rows:
        return leaf.index_select(0, rows.to(leaf.device))
    return leaf


def _cut(leaf: Any, shape: tuple[int, int], width: int) -> Any:
    """An input without the positions behind `width`, where it has those of tokens of this shape."""
    rows, full = shape
    if not isinstance(leaf, Tensor) or width == full or leaf.dim() < 2:
        return leaf
    if leaf.shape[0] in (1, rows) and leaf.shape[1] == full and (leaf.shape[0] == rows or leaf.dim() == 2):
        return leaf[:, :width].contiguous()
    if leaf.dim() == 4 and leaf.shape[0] in (1, rows) and leaf.shape[3] == full:
        cut = leaf[..., :width]
        return (cut[:, :, :width] if leaf.shape[2] == full else cut).contiguous()
    return leaf


def _joined(parts: Sequence[Any], sizes: Sequence[int], widths: Sequence[int], width: int, places: Tensor) -> Any:
    """The results of all groups as one, in the order of the rows, whose places are given."""
    flat = [tree_flatten(_as_mapping(part)) for part in parts]
    joined = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(column[0], Tensor):
            joined.append(column[0])
            continue
        has_rows = all(t.dim() > 0 and t.shape[0] == size for t, size in zip(column, sizes, strict=True))
        has_positions = all(t.dim() > 1 and t.shape[1] == own for t, own in zip(column, widths, strict=True))
        wide = [_filled(t, width) if has_positions else t for t in column]
        if not has_rows or len({t.shape[1:] for t in wide}) > 1:
            raise UsageError(
                f"the model returned a tensor {tuple(column[0].shape)} for {sizes[0]} rows of {widths[0]} positions, which is "
                "not one result a row; compute losses and means over the batch outside of the model"
            )
        joined.append(torch.cat(wide).index_select(0, places.to(wide[0].device)))
    return _like(parts[0], tree_unflatten(joined, flat[0][1]))


def _filled(tensor: Tensor, width: int) -> Tensor:
    """Zeros behind the positions (dimension 1), up to the width."""
    missing = width - tensor.shape[1]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])], dim=1)


def _as_mapping(result: Any) -> Any:
    """A class of results that is a mapping (transformers' ModelOutput) as a plain dict, which a tree can be made of."""
    return dict(result.items()) if isinstance(result, Mapping) and type(result) is not dict else result


def _like(example: Any, result: Any) -> Any:
    """The result in the class of the example."""
    if isinstance(example, Mapping) and type(example) is not dict:
        return type(example)(**result)
    return result
