"""Images that torchvision stores in one array, turned into tensors all at once."""

from __future__ import annotations

import sys
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

_NUM_CHECKED: Final = 16
"""Items, spread over the dataset, that must come out the same bit for bit; every transform here works element by element."""


class StoredImages(NamedTuple):
    """How images are stored: 'grey' as (items, height, width), 'colour' as (items, height, width, 3), bytes; and Normalize."""

    colours: Literal["grey", "colour"]
    normalised_by: list[Any]


def stored_images(dataset: Any) -> tuple[Tensor, Tensor] | None:
    """All images (items, channels, height, width) and targets of a dataset, as its items have them one by one.

    For datasets of torchvision that are stored as one array of bytes (MNIST and its kind, CIFAR), or a part of one, under
    ToTensor and Normalize alone; None for any other. Some items are built both ways and compared bit for bit.
    """
    rows = None
    inside = dataset
    while type(inside) is Subset:
        picked = torch.as_tensor(inside.indices)
        rows = picked if rows is None else picked[rows]
        inside = inside.dataset
    found = _whole(inside, rows)
    if found is None or not len(dataset):
        return None
    images, targets = found
    checked = {round(i * (len(dataset) - 1) / (_NUM_CHECKED - 1)) for i in range(_NUM_CHECKED)}
    return found if all(_is_same(dataset[i], images[i], targets[i]) for i in checked) else None


def innermost(dataset: Any) -> Any:
    """The dataset that a part of a dataset (`Subset`) is of; any other dataset itself."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def stored_as(dataset: Any) -> StoredImages | None:
    """How torchvision stores the images of this dataset, and what ToTensor is followed by; None for another dataset."""
    kinds = sys.modules.get("torchvision.datasets")
    if kinds is None or getattr(dataset, "target_transform", None) is not None:
        return None
    transforms = _transforms(getattr(dataset, "transform", None))
    get_item = getattr(type(dataset), "__getitem__", None)
    if transforms is None:
        return None
    if get_item is kinds.MNIST.__getitem__:
        data = dataset.data
        is_bytes = isinstance(data, Tensor) and data.dtype is torch.uint8 and data.ndim == 3
        return StoredImages("grey", transforms) if is_bytes else None
    return StoredImages("colour", transforms) if get_item is kinds.CIFAR10.__getitem__ else None


def _whole(dataset: Any, rows: Tensor | None) -> tuple[Tensor, Tensor] | None:
    found = stored_as(dataset)
    if found is None:
        return None
    data = dataset.data
    bytes_ = data.unsqueeze(1) if found.colours == "grey" else torch.from_numpy(data).permute(0, 3, 1, 2)
    targets = torch.as_tensor(dataset.targets).to(torch.int64)  # as batches of Python's numbers are
    if rows is not None:
        bytes_, targets = bytes_[rows], targets[rows]
    images = bytes_.to(torch.get_default_dtype(), memory_format=torch.contiguous_format).div_(255)
    for one in found.normalised_by:
        mean, std = (torch.as_tensor(v, dtype=images.dtype).view(1, -1, 1, 1) for v in (one.mean, one.std))
        images.sub_(mean).div_(std)
    return images, targets


def _transforms(transform: Any) -> list[Any] | None:
    """What follows ToTensor; None where that is not first, or something else than Normalize follows."""
    kinds = sys.modules.get("torchvision.transforms")
    if kinds is None:
        return None
    parts = list(transform.transforms) if type(transform) is kinds.Compose else [transform]
    if not parts or type(parts[0]) is not kinds.ToTensor or any(type(p) is not kinds.Normalize for p in parts[1:]):
        return None
    return parts[1:]


def _is_same(item: Any, image: Tensor, target: Tensor) -> bool:
    return (
        isinstance(item, (tuple, list))
        and len(item) == 2
        and isinstance(item[0], Tensor)
        and type(item[1]) is int
        and item[0].dtype is image.dtype
        and torch.equal(item[0], image)
        and item[1] == int(target)
    )
