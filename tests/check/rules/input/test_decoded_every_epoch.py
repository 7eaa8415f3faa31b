from __future__ import annotations

import pytest
from tests.check.rules.input.loading import fetched, waiting
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.rules.input.decoded_every_epoch import RULE
from flatout.core.records.trial import TimeDataset
from flatout.core.records.workload import LibraryFrame


def decoding(*, hot: str = "record = json.load(file)", num_epochs: float = 0.1, **facts: bool) -> EvidenceBuilder:
    run = waiting(wait_s=0.06, hot=hot, num_epochs=num_epochs)
    fetched(run, **facts)
    return run


def test_the_data_set_is_tried_by_hand() -> None:
    assert proposed(RULE, waiting(num_epochs=0.1).build()) == [TimeDataset(loader=0)]


@pytest.mark.parametrize(
    "hot",
    [
        "record = json.load(file)",
        "x = np.load(path)",
        "with gzip.open(path) as f:",
        "image = Image.open(self.paths[i])",
    ],
)
def test_decoding_in_a_second_epoch_is_named_at_its_line(hot: str) -> None:
    finding = only_finding(RULE, decoding(hot=hot).build())
    assert finding.where is not None
    assert finding.where.text == hot
    assert finding.saved_s[1] == pytest.approx(0.059)


ON_AN_IMAGE = "image = self.transform(self.rows[i])"


def below(library: str, function: str) -> EvidenceBuilder:
    """The data set's time lies on a line that says nothing of files, in this function of a package."""
    run = decoding(hot=ON_AN_IMAGE)
    run.lines.clear()
    via = (LibraryFrame(file=library, line=100, function=function),)
    run.sampled(run.line("data.py", 7, ON_AN_IMAGE, via=via), 0.05, phase="data")
    return run


@pytest.mark.parametrize(
    ("library", "function"),
    [
        ("PIL/ImageFile.py", "load"),
        ("PIL/Image.py", "open"),
        ("soundfile.py", "_array_io"),
        ("mypackage/files.py", "read"),
    ],
)
def test_a_package_that_opens_or_reads_a_file_decodes(library: str, function: str) -> None:
    assert only_finding(RULE, below(library, function).build()).where is not None


@pytest.mark.parametrize(
    ("library", "function"),
    [
        ("PIL/Image.py", "fromarray"),
        ("PIL/Image.py", "load"),
        ("torchvision/transforms/functional.py", "to_tensor"),
        ("torchaudio/functional/functional.py", "spectrogram"),
    ],
)
def test_a_package_that_works_on_arrays_in_memory_does_not(library: str, function: str) -> None:
    assert not list(RULE.check(below(library, function).build()))


def test_an_image_made_of_an_array_is_no_file() -> None:
    assert not list(RULE.check(decoding(hot="image = PIL.Image.fromarray(self.rows[i].numpy())").build()))


def test_other_work_on_the_items_is_left_alone() -> None:
    assert not list(RULE.check(decoding(hot="rows.append([float(v) for v in line])").build()))


def test_a_single_pass_is_left_alone() -> None:
    assert not list(RULE.check(decoding(num_epochs=0.0).build()))


def test_items_that_differ_each_time_are_left_alone() -> None:
    assert not list(RULE.check(decoding(repeatable=False).build()))
