from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.core.records.trial import TimeDataset, TrialResult
from flatout.tune.levers.communication.prepare_in_memory import LEVER, edit
from flatout.tune.rewrite.source import changed_places, several_places


class Windows(Dataset[Any]):
    """Items of several kinds; counts how often each is made."""

    def __init__(self) -> None:
        self.num_made = 0
        self.rate = 7

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_made += 1
        return {
            "x": torch.arange(4) * index,
            "pair": (index, 0.5 * index),
            "name": f"window {index}",
        }


def epochs(loader: DataLoader[Any], num: int = 3) -> list[Any]:
    torch.manual_seed(0)
    return [batch for _ in range(num) for batch in loader]


def batches_of(text: str) -> list[Any]:
    """What `batches()` of a script returns, each batch as a list."""
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(text, namespace)
    return [list(batch) for batch in namespace["batches"]()]


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two) and one.dtype == two.dtype
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"drop_last": True}, {}])
def test_batches_are_the_same_bit_for_bit_and_items_are_made_once(options: dict[str, Any]) -> None:
    expected = epochs(DataLoader(Windows(), 5, **options))
    data = Windows()
    with pulled(LEVER) as hooks:
        loader = DataLoader(data, 5, **options)
        found = epochs(loader)
        assert hooks.done == [LEVER.id]
    assert len(found) == len(expected)
    assert all(map(same, found, expected))
    assert data.num_made == len(data) or options.get("drop_last")
    assert loader.dataset.rate == 7  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_batches_are_the_same_without_workers(options: dict[str, Any]) -> None:
    expected = epochs(DataLoader(Windows(), 5, shuffle=True, **options))
    with pulled(LEVER):
        found = epochs(DataLoader(Windows(), 5, shuffle=True, **options))
    assert all(map(same, found, expected))


def test_a_collate_function_of_the_users_own_gets_kept_items() -> None:
    def numbered(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for item in items:
            item["number"] = len(item)  # an item that is filled up is not what is kept
        return items

    expected = epochs(DataLoader(Windows(), 5, collate_fn=numbered))
    data = Windows()
    with pulled(LEVER) as hooks:
        found = epochs(DataLoader(data, 5, collate_fn=numbered))
        assert hooks.done == [LEVER.id]
    assert all(map(same, found, expected))
    assert data.num_made == len(data)


def test_rows_and_parts_of_rows_are_cut_from_their_tensors() -> None:
    rows = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    for data in (rows, Subset(rows, [4, 1, 0])):
        expected = epochs(DataLoader(data, 2, shuffle=True))
        with pulled(LEVER):
            found = epochs(DataLoader(data, 2, shuffle=True))
        assert all(map(same, found, expected))


def test_batch_samplers_are_kept() -> None:
    batches = BatchSampler(SequentialSampler(range(23)), 4, drop_last=True)
    expected = epochs(DataLoader(Windows(), batch_sampler=batches))
    with pulled(LEVER):
        found = epochs(DataLoader(Windows(), batch_sampler=batches))
    assert all(map(same, found, expected))


def test_what_is_iterated_or_another_dataset_or_set_up_by_a_function_is_left_alone() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with pulled(LEVER, datasets=("Other",)) as hooks:
        assert len(list(DataLoader(Windows(), 5))) == 5
        assert not hooks.done
    with pulled(LEVER) as hooks:
        assert len(list(DataLoader(Stream(), 2))) == 2
        DataLoader(Windows(), 5, num_workers=1, worker_init_fn=print)
        assert not hooks.done


SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset


class Squares(Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return torch.tensor(index * index), index


def batches():
    torch.manual_seed(0)
    rows = TensorDataset(torch.arange(9.0), torch.arange(9))
    squares = Squares()
    options = {{"batch_size": 2, "shuffle": True}}
    if rows is not None:
        workers = dict(drop_last=True, timeout=0, prefetch_factor=None)
        options.update(workers)
    {loader}
    return [batch for _ in range(2) for batch in loader]
"""
RETURNED = (
    SCRIPT.format(loader="loader = loader_of(squares)")
    + """

def loader_of(squares):
    return DataLoader(squares, 2, shuffle=True)
"""
)
LOADERS = {
    "rows": (
        "loader = DataLoader(rows, batch_size=2, shuffle=True, drop_last=True)",
        "items = TensorRows(*rows.tensors)\n"
        "    loader = DataLoader(items, batch_size=2, shuffle=True, drop_last=True, collate_fn=list)",
    ),
    "rows without a name": (
        "loader = DataLoader(TensorDataset(torch.arange(7.0)), batch_size=2, shuffle=True)",
        "items = TensorRows(torch.arange(7.0))\n    loader = DataLoader(items, batch_size=2, shuffle=True, collate_fn=list)",
    ),
    "rows in an order that is decided when it runs": (
        "loader = DataLoader(rows, 2, shuffle=bool(3))",
        "loader = DataLoader(items, 2, shuffle=bool(3), collate_fn=list)",
    ),
    "rows in order": ("loader = DataLoader(rows, 4)", "loader = DataLoader(items, 4, collate_fn=list)"),
    "items": ("loader = DataLoader(Squares(), batch_size=2, shuffle=True, num_workers=1)", "[dataset[i] for i in"),
    "rows, options elsewhere": (
        "loader = DataLoader(rows, **options)",
        "loader = DataLoader(items, **{k: v for k, v in options.items() if k not in (",
    ),
    "items, options elsewhere": (
        "loader = DataLoader(Squares(), **options)",
        "DataLoader(items, **{k: v for k, v in options.items() if k not in (",
    ),
    "items, options that are not known": (
        "loader = DataLoader(squares, sampler=RandomSampler(squares), **dict([('batch_size', 2)]))",
        "items = [squares[i] for i in range(len(squares))]\n"
        "    loader = DataLoader(items, sampler=RandomSampler(squares), **dict([('batch_size', 2)]))",
    ),
    "rows, counted": (
        "loader = DataLoader(rows, 4)\n    print(len(loader.dataset))",
        "loader = DataLoader(items, 4, collate_fn=list)",
    ),
    "items, collated": ("loader = DataLoader(Squares(), 2, collate_fn=list)", "DataLoader(items, 2, collate_fn=list)"),
}


def test_items_of_one_layout_become_rows_whatever_the_options_are() -> None:
    line = "loader = DataLoader(squares, sampler=RandomSampler(squares), **dict([('batch_size', 2)]))"
    text = SCRIPT.format(loader=line)
    new = edit(text, {"file": "a.py", "function": "batches", "code": line, "stacked": True})
    assert (
        "loader = DataLoader(items, sampler=RandomSampler(squares), **dict([('batch_size', 2)]), collate_fn=list)"
        in new
    )
    assert same(batches_of(text), batches_of(new))


def test_workers_are_left_out_of_options_that_come_from_elsewhere() -> None:
    text = """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return torch.tensor(index ** 2), index

def loader_of(data, **options):
    return DataLoader(data, shuffle=True, **options)

def batches():
    torch.manual_seed(0)
    return list(loader_of(Squares(), batch_size=2, num_workers=0, prefetch_factor=None, persistent_workers=False))
"""
    line = "return DataLoader(data, shuffle=True, **options)"
    new = edit(text, {"file": "a.py", "function": "loader_of", "code": line, "stacked": True})
    assert 'if k not in ("num_workers", "persistent_workers", ' in new
    assert same(batches_of(text), batches_of(new))
    wants = new.replace(
        "num_workers=0, prefetch_factor=None, persistent_workers=False", "num_workers=1, prefetch_factor=2"
    )
    assert same(batches_of(text), batches_of(wants))


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.slow
def test_the_edited_script_makes_the_same_batches(name: str) -> None:
    code, expected = LOADERS[name]
    text = SCRIPT.format(loader=code)
    new = edit(text, {"file": "a.py", "function": "batches", "code": code.split("\n")[0]})
    assert expected in new
    assert "num_workers" not in new
    found = []
    for one in (text, new):
        made: dict[str, Any] = {"__name__": __name__}
        exec(one.replace(", num_workers=1", ""), made)
        found.append(made["batches"]())
    assert same(*found)


def test_the_class_that_cuts_rows_is_written_once_and_before_its_first_use() -> None:
    first, second = "train = DataLoader(TensorDataset(torch.arange(7.0)), 2)", "test = DataLoader(rows, 4)"
    head = "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\nrows = TensorDataset(torch.arange(9.0))\n"
    text = f"{head}{first}\nimport math\n{second}\nfound = [*train, *test]\n"
    new = text
    for code in (first, second):
        new = edit(new, {"file": "a.py", "function": "<module>", "code": code})
    assert new.count("class TensorRows(") == 1
    found = []
    for one in (text, new):
        namespace: dict[str, Any] = {"__name__": __name__}
        exec(one, namespace)
        found.append([list(batch) for batch in namespace["found"]])
    assert same(*found)


@pytest.mark.parametrize(
    "line", ["loader = DataLoader(squares, 2, shuffle=True)", "return DataLoader(squares, 2, shuffle=True)"]
)
def test_items_of_one_layout_become_rows_of_tensors_and_a_loader_may_be_returned(line: str) -> None:
    text = SCRIPT.format(loader=line) if line.startswith("loader") else RETURNED
    where = "batches" if line.startswith("loader") else "loader_of"
    new = edit(text, {"file": "a.py", "function": where, "code": line, "stacked": True})
    assert "items = TensorRows(*default_collate([squares[i] for i in range(len(squares))]))" in new
    assert "DataLoader(items, 2, shuffle=True, collate_fn=list)" in new
    assert same(batches_of(text), batches_of(new))


IMAGES = """
import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

as_tensor = transforms.ToTensor()
options = {{"batch_size": 2, "pin_memory": False}}
train_loader = DataLoader(datasets.MNIST("data", train=True, download=True, transform={train}), **options)
test_set = datasets.MNIST("data", train=False, transform={test})
test_loader = DataLoader(test_set, shuffle=False, **options)
found = [list(one) for _ in range(2) for one in (train_loader, test_loader)]
"""


@pytest.mark.parametrize(
    ("train", "test", "num"),
    [
        ("transforms.ToTensor()", "transforms.ToTensor()", 2),
        ("as_tensor", "as_tensor", 2),
        ("transforms.ToTensor()", "transforms.ToTensor(\n        )", 2),
        ("as_tensor", "transforms.ToTensor()", 1),
        ("transforms.ToTensor()", "transforms.ToTensor(), target_transform=None", 1),
    ],
)
@pytest.mark.slow
def test_images_of_the_test_loader_are_prepared_like_those_of_training(
    train: str, test: str, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Images(Dataset[Any]):
        """Bytes and targets, as torchvision's MNIST has them."""

        def __init__(self, root: str, train: bool, transform: Any, **rest: Any) -> None:
            self.data = torch.arange(5 * 6, dtype=torch.uint8).view(5, 2, 3) + 100 * train
            self.targets, self.transform = torch.arange(5) % 3, transform

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return self.transform(self.data[index]), int(self.targets[index])

    vision: Any = ModuleType("torchvision")
    vision.datasets = SimpleNamespace(MNIST=Images)
    vision.transforms = SimpleNamespace(ToTensor=lambda: lambda image: image[None].float() / 255)
    monkeypatch.setitem(sys.modules, "torchvision", vision)
    text = IMAGES.format(train=train, test=test)
    code = next(line for line in text.splitlines() if line.startswith("train_loader"))
    parameters: dict[str, Any] = {
        "file": "a.py",
        "function": "<module>",
        "code": code,
        "images": "grey",
        "normalised": False,
    }
    new = edit(text, parameters)
    assert new.count("TensorRows(") == 1 + num  # the class, and what is made of it
    found = []
    for one in (text, new):
        namespace: dict[str, Any] = {"__name__": __name__}
        exec(one, namespace)
        found.append([[list(batch) for batch in batches] for batches in namespace["found"]])
    assert same(*found)


SPLIT = """
import torch
from torch.utils.data import DataLoader, Dataset, Subset, random_split

class Squares(Dataset):
    def __init__(self):
        self.num_made = 0
    def __len__(self):
        return 12
    def __getitem__(self, index):
        self.num_made += 1
        return torch.tensor([float(index)]), index ** 2

class Data:
    def __init__(self):
        self.whole = Squares()
        self.train, self.val = random_split(self.whole, [8, 4], generator=torch.Generator().manual_seed(3))
        self.test = Squares(){more}
    def train_loader(self):
        return DataLoader(self.train, batch_size=2, shuffle=True)
    def val_loader(self):
        return DataLoader(self.val, batch_size=2)
    def test_loader(self):
        return DataLoader(self.test, batch_size=2)

torch.manual_seed(1)
data = Data()
found = []
for loader in (data.train_loader(), data.val_loader(), data.test_loader()):
    found += [list(loader), list(loader)]
"""


@pytest.mark.parametrize(
    ("more", "num"),
    [("", 2), ("\n        self.val.transform = None", 1), ("\n        self.val = Subset(self.val, range(4))", 1)],
)
@pytest.mark.parametrize("also", [False, True])
@pytest.mark.slow
def test_the_other_part_of_a_split_data_set_is_prepared_like_the_first(more: str, num: int, also: bool) -> None:
    """A part that may have got a transform of its own is not; where both loaders were met, each is changed once."""
    text = SPLIT.format(more=more)
    places = [
        {
            "file": "a.py",
            "function": f"Data.{name}_loader",
            "code": f"return DataLoader(self.{name}, batch_size=2{how})",
        }
        for name, how in (("train", ", shuffle=True"), ("val", ""))
    ]
    new = text
    for place in changed_places(several_places(places[: 1 + also]) | {"stacked": True}):
        new = edit(new, place)
    num = 2 if also else num
    assert new.count("= TensorRows(") == num
    found = []
    for one in (text, new):
        namespace: dict[str, Any] = {"__name__": __name__}
        exec(one, namespace)
        found.append([[list(batch) for batch in batches] for batches in namespace["found"]])
        made = namespace["data"].whole.num_made
        assert made == (24 if one is text else 12 if num == 2 else 16)
    assert same(*found)


def test_a_variable_of_the_same_name_in_another_function_is_another_data_set() -> None:
    text = """
from torch.utils.data import DataLoader, random_split

def of_training(whole):
    train, val = random_split(whole, [8, 4])
    return DataLoader(train, batch_size=2)

def of_tests(val):
    return DataLoader(val, batch_size=2)
"""
    place = {
        "file": "a.py",
        "function": "of_training",
        "code": "return DataLoader(train, batch_size=2)",
        "stacked": True,
    }
    new = edit(text, place)
    assert new.count("= TensorRows(") == 1
    assert new.endswith("def of_tests(val):\n    return DataLoader(val, batch_size=2)\n")


def test_a_loader_whose_data_set_another_takes_over_gets_single_items() -> None:
    line = "loader = DataLoader(squares, 2, shuffle=True, num_workers=1)"
    taken = "(lambda first: DataLoader(first.dataset, batch_sampler=first.batch_sampler))(loader)"
    text = SCRIPT.format(loader=f"{line}\n    loader = {taken}")
    new = edit(text, {"file": "a.py", "function": "batches", "code": line, "listed": True})
    assert "items = [squares[i] for i in range(len(squares))]\n    loader = DataLoader(items, 2, shuffle=True)" in new
    found = []
    for one in (text, new):
        namespace: dict[str, Any] = {"__name__": __name__}
        exec(one, namespace)
        found.append(namespace["batches"]())
    assert same(*found)


def test_the_line_to_change_is_that_of_the_loader_that_was_taken_over(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("first = DataLoader(data, batch_size=32)\nloader = prepare(first)\n")
    run = EvidenceBuilder(data=0.01)
    first = run.line(str(script), 1, "first = DataLoader(data, batch_size=32)")
    second = run.line(str(script), 2, "loader = prepare(first)")
    loader = run.loader(wait_s=0.01, constructed=second, taken_from=first)
    facts = {"repeatable": True, "item_by_item": True}
    run.trial(TrialResult(trial=TimeDataset(loader=loader), now_s=0.01, cured_s=0.0, facts=facts))
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", "train.py"), cwd=str(tmp_path))
    sources = tuple(msgspec.structs.replace(s, file=str(script), function="<module>") for s in evidence.sources)
    [found] = LEVER.propose(msgspec.structs.replace(evidence, workload=workload, sources=sources), [])
    assert isinstance(found, Candidate)
    assert found.parameters["code"] == "first = DataLoader(data, batch_size=32)"
    assert found.parameters["listed"] is True


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        ("loader = DataLoader(rows, 2); print(len(loader.dataset))", "read elsewhere|alone"),
        ("loader = DataLoader(rows, batch_sampler=[[1], [2]])", "batch_sampler"),
        ("loader = list(DataLoader(rows, 2))", "alone"),
        ("loader = DataLoader(rows, **options, collate_fn=options.pop('list', None))", "cannot be told"),
        ("loader = DataLoader(rows, **dict(batch_size=2))", "cannot be told"),
        ("loader = DataLoader(Squares(), **{**options})", "cannot be told"),
    ],
)
def test_the_edit_is_refused(loader: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edit(SCRIPT.format(loader=loader), {"file": "a.py", "function": "batches", "code": loader})


@pytest.mark.parametrize(("collate_s", "kind"), [(0.001, Candidate), (0.0095, Refusal)])
def test_a_collate_function_that_takes_the_time_is_refused(collate_s: float, kind: type) -> None:
    run = EvidenceBuilder(data=0.01)
    loader = run.loader(has_own_collate=True, wait_s=0.01)
    facts = {"repeatable": True, "item_by_item": True}
    run.trial(
        TrialResult(
            trial=TimeDataset(loader=loader), now_s=0.01, cured_s=0.0, facts=facts, parts={"collate": collate_s}
        )
    )
    [said] = LEVER.propose(run.build(), [])
    assert isinstance(said, kind)


def test_a_run_without_such_a_loader_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(refusal, Refusal)


@pytest.mark.parametrize(("is_stored", "warm_up_steps"), [(True, 0), (False, 100)])
def test_images_that_are_stored_in_one_array_need_no_epoch_to_be_prepared(is_stored: bool, warm_up_steps: int) -> None:
    run = EvidenceBuilder(data=0.01)
    loader = run.loader(wait_s=0.01)  # no epoch ended in what was observed
    facts = {"repeatable": True, "item_by_item": True, "stored": is_stored}
    result = TrialResult(
        trial=TimeDataset(loader=loader), now_s=0.01, cured_s=0.0, facts=facts, parts={"num_items": 3200.0}
    )
    run.trial(result)
    [offered] = LEVER.propose(run.build(), [])
    assert isinstance(offered, Candidate)
    assert offered.warm_up_steps == warm_up_steps
    assert (offered.saved_s[0] < 0) == (not is_stored)
