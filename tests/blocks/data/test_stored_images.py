"""Images prepared all at once are those that the dataset makes one by one."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset

from flatout.blocks.data.item_cache import CachedBatches, identity_collate
from flatout.blocks.data.stored_images import stored_images


class _Images:
    transform: Any = None
    target_transform: Any = None
    data: Any
    targets: Any
    mode = "L"

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image: Any = Image.fromarray(np.asarray(self.data[index]), mode=self.mode)
        target = self._target(index)
        image = image if self.transform is None else self.transform(image)
        return image, target if self.target_transform is None else self.target_transform(target)

    def _target(self, index: int) -> Any:
        return int(self.targets[index])


class _MNIST(_Images):
    pass


class _FashionMNIST(_MNIST):
    pass


class _CIFAR10(_Images):
    mode = "RGB"

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return super().__getitem__(index)

    def _target(self, index: int) -> Any:
        return self.targets[index]


class _CIFAR100(_CIFAR10):
    pass


class _Compose:
    def __init__(self, parts: list[Any]) -> None:
        self.transforms = parts

    def __call__(self, image: Any) -> Any:
        for part in self.transforms:
            image = part(image)
        return image


class _ToTensor:
    def __call__(self, image: Any) -> torch.Tensor:
        array = np.array(image)
        array = array[:, :, None] if array.ndim == 2 else array
        return torch.from_numpy(array).permute(2, 0, 1).contiguous().to(torch.get_default_dtype()).div(255)


class _Normalize:
    def __init__(self, mean: Any, std: Any) -> None:
        self.mean, self.std = mean, std

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.as_tensor(v, dtype=image.dtype).view(-1, 1, 1) for v in (self.mean, self.std))
        return image.clone().sub_(mean).div_(std)


class _Resize:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        return image.resize((self.size, self.size))


class _RandomErasing:
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image * (torch.rand_like(image) > 0.5)


def _as_torchvision_does() -> tuple[Any, Any]:
    """What torchvision does with an image, for environments that have it not."""
    datasets, transforms = ModuleType("torchvision.datasets"), ModuleType("torchvision.transforms")
    vars(datasets).update(MNIST=_MNIST, FashionMNIST=_FashionMNIST, CIFAR10=_CIFAR10, CIFAR100=_CIFAR100)
    vars(transforms).update(
        Compose=_Compose, ToTensor=_ToTensor, Normalize=_Normalize, Resize=_Resize, RandomErasing=_RandomErasing
    )
    return datasets, transforms


@functools.cache
def _torchvision() -> tuple[Any, Any] | str:
    """The real one, or why it cannot be imported."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        for name in ("nms", "qnms"):  # its wheels ask for them, and a CPU build of torch cannot load them
            if torch.version.cuda is None and not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from torchvision import datasets, transforms
    except (ImportError, RuntimeError) as e:
        return f"torchvision cannot be imported: {e}"
    return datasets, transforms


@pytest.fixture(params=["torchvision", "stand-in"])
def vision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = _torchvision() if request.param == "torchvision" else _as_torchvision_does()
    if isinstance(found, str):
        pytest.skip(found)
    datasets, transforms = found
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)
    monkeypatch.setitem(sys.modules, "torchvision.transforms", transforms)
    to_tensor = transforms.ToTensor()
    grey = transforms.Compose([to_tensor, transforms.Normalize((0.1307,), (0.3081,))])
    colour = transforms.Compose([to_tensor, transforms.Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))])
    return SimpleNamespace(datasets=datasets, transforms=transforms, to_tensor=to_tensor, grey=grey, colour=colour)


def mnist(vision: Any, transform: Any, num: int = 50) -> Any:
    dataset = vision.datasets.FashionMNIST.__new__(vision.datasets.FashionMNIST)
    dataset.data = torch.randint(0, 256, (num, 28, 28), dtype=torch.uint8)
    dataset.targets = torch.randint(0, 10, (num,))
    dataset.transform, dataset.target_transform = transform, None
    return dataset


def cifar(vision: Any, transform: Any, num: int = 50) -> Any:
    dataset = vision.datasets.CIFAR100.__new__(vision.datasets.CIFAR100)
    dataset.data = np.random.default_rng(0).integers(0, 256, (num, 32, 32, 3), dtype=np.uint8)
    dataset.targets = [i % 100 for i in range(num)]
    dataset.transform, dataset.target_transform = transform, None
    return dataset


def test_all_at_once_is_one_by_one(vision: Any) -> None:
    for dataset in (
        mnist(vision, vision.to_tensor),
        mnist(vision, vision.grey),
        cifar(vision, vision.colour),
        Subset(cifar(vision, vision.colour), [7, 3, 49, 3]),
        Subset(Subset(mnist(vision, vision.grey), range(5, 45)), [1, 39, 0]),
    ):
        found = stored_images(dataset)
        assert found is not None
        images, targets = found
        for i in range(len(dataset)):
            image, target = dataset[i]
            assert torch.equal(images[i], image) and images[i].dtype is image.dtype and targets[i] == target


def test_targets_are_whole_numbers_as_in_batches_whatever_they_are_stored_as(vision: Any) -> None:
    dataset = mnist(vision, vision.to_tensor)
    dataset.targets = dataset.targets.float()
    found = stored_images(dataset)
    assert found is not None and found[1].dtype is torch.int64
    dataset = cifar(vision, vision.to_tensor)
    dataset.targets = [target > 50 for target in dataset.targets]
    assert stored_images(dataset) is None


def test_other_items_are_left_to_the_dataset(vision: Any) -> None:
    class Noisy(vision.datasets.MNIST):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            image, target = super().__getitem__(index)
            return image + torch.rand(1), target

    noisy, relabelled = mnist(vision, vision.to_tensor), mnist(vision, vision.to_tensor)
    noisy.__class__ = Noisy
    relabelled.target_transform = lambda target: target + 1
    kinds = vision.transforms
    for dataset in (
        mnist(vision, kinds.Compose([kinds.Resize(14), vision.to_tensor])),
        mnist(vision, kinds.Compose([vision.to_tensor, kinds.RandomErasing()])),
        mnist(vision, None),
        noisy,
        relabelled,
        torch.utils.data.TensorDataset(torch.zeros(3)),
    ):
        assert stored_images(dataset) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loader_hands_out_the_same_batches_and_draws_the_same_numbers(vision: Any, dtype: torch.dtype) -> None:
    dataset = mnist(vision, vision.grey)
    torch.set_default_dtype(dtype)
    try:
        runs = []
        for how in ({"dataset": dataset}, {"dataset": CachedBatches(dataset), "collate_fn": identity_collate}):
            torch.manual_seed(0)
            batches = [b for _ in range(2) for b in DataLoader(batch_size=16, shuffle=True, **how)]
            runs.append((batches, torch.rand(1)))
    finally:
        torch.set_default_dtype(torch.float32)
    (plain, plain_next), (cached, cached_next) = runs
    assert torch.equal(plain_next, cached_next)
    for one, two in zip(plain, cached, strict=True):
        assert type(one) is type(two)
        assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(one, two, strict=True))
