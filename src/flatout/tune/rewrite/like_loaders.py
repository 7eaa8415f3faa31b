"""Statements of a text that make loaders of the same kind of items as another does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

import libcst as cst
from libcst import matchers as m

from flatout.tune.rewrite.calls import LOADER, argument
from flatout.tune.rewrite.enclosing_blocks import assignment, only_small
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.source import SourcePlace, code_of, names_in, places_in

_TRANSFORM_AT: Final = 2
"""Where torchvision's MNIST and CIFAR take `transform` by position: (root, train, transform, ...)."""
_SAME_IMAGES: Final = {"root", "train", "split", "download", "transform"}
"""Arguments of torchvision's image sets that leave what an image becomes as it is."""
_SPLIT: Final = "torch.utils.data.random_split"


def loaders_of_like_images(place: SourcePlace) -> Iterator[SourcePlace]:
    """Other statements that make a loader of the same class of torchvision's images under the same transform."""
    own = _images(place)
    if own is None:
        return
    for other in _others(place):
        if _images(other) == own:
            yield other


def loaders_of_same_split(place: SourcePlace) -> Iterator[SourcePlace]:
    """Other statements that make a loader of another part of the data set that `random_split` parted, in the same scope.

    A part that is written to elsewhere is left out: it may have got a transform of its own, or be another data set by then.
    """
    own = _dataset(place)
    if own is None:
        return
    split = [parts for parts in _splits(place, own) if code_of(own) in parts]
    written = [name for one in m.findall(place.module, m.Assign() | m.AnnAssign()) for name in targets_of(one)]
    for other in _others(place):
        part = _dataset(other)
        if len(split) != 1 or part is None or code_of(part) not in split[0] or not _share_names(place, other, own):
            continue
        if not any(f"{name}.".startswith(f"{code_of(part)}.") for name in written):
            yield other


def _share_names(place: SourcePlace, other: SourcePlace, data: cst.BaseExpression) -> bool:
    """Whether such a name means the same in both places: a variable in one function, an attribute in one class."""
    return place.function is other.function if isinstance(data, cst.Name) else place.owner is other.owner


def _others(place: SourcePlace) -> Iterator[SourcePlace]:
    return (p for p in places_in(place.module) if p.statement is not place.statement and only_small(p.statement))


def _splits(place: SourcePlace, data: cst.BaseExpression) -> Iterator[list[str]]:
    """What the parts of each split data set are called: variables of the place's function, or attributes of its class."""
    function = place.function or place.module
    scope = function if isinstance(data, cst.Name) else place.owner or function
    for assign in m.findall(scope, m.Assign(targets=[m.AssignTarget(target=m.Tuple())])):
        assert isinstance(assign, cst.Assign)
        target, value = assign.targets[0].target, assign.value
        if (
            isinstance(value, cst.Call)
            and call_name(place.module, value.func) == _SPLIT
            and isinstance(target, cst.Tuple)
        ):
            yield [code_of(element.value) for element in target.elements]


def _dataset(place: SourcePlace) -> cst.BaseExpression | None:
    """The data set of the loader that a statement makes, if that is all it does."""
    _, call = assignment(place.statement) or (None, returned(place.statement))
    if not isinstance(call, cst.Call) or call_name(place.module, call.func) not in LOADER or not call.args:
        return None
    return call.args[0].value


def _images(place: SourcePlace) -> tuple[str, str] | None:
    """The class and the transform, as written, of the images that a statement makes a loader of; None for other statements."""
    scope = place.function or place.module
    dataset = _dataset(place)
    if isinstance(dataset, cst.Name):
        values = [a.value for a in m.findall(scope, m.Assign()) if code_of(dataset) in targets_of(a)]  # type: ignore[attr-defined]
        dataset = values[0] if len(values) == 1 else dataset
    if not isinstance(dataset, cst.Call) or any(a.star for a in dataset.args):
        return None
    transform = argument(dataset, "transform", _TRANSFORM_AT)
    if transform is None or not {a.keyword.value for a in dataset.args if a.keyword} <= _SAME_IMAGES:
        return None
    written = [name for one in m.findall(place.module, m.Assign() | m.AnnAssign()) for name in targets_of(one)]
    is_settled = all(written.count(name) <= 1 for name in names_in(transform))
    return (code_of(dataset.func), _without_spaces(transform)) if is_settled else None


def returned(statement: cst.CSTNode) -> cst.BaseExpression | None:
    """What a `return` alone returns."""
    small = only_small(statement)
    return small.value if isinstance(small, cst.Return) else None


def targets_of(assign: cst.CSTNode) -> list[str]:
    """What an assignment writes to, as written."""
    if isinstance(assign, cst.AnnAssign):
        return [code_of(assign.target)]
    return [code_of(t.target) for t in cst.ensure_type(assign, cst.Assign).targets]


def _without_spaces(node: cst.BaseExpression) -> str:
    """An expression as Python writes it, whatever lines and spaces it has in the file."""
    return ast.unparse(ast.parse(code_of(node), mode="eval"))
