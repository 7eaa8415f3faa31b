"""What holds for every test: the torch state that all tests share is left as it was found."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import pytest
from hypothesis import settings

# Threads of two workers on few cores spin while they wait for each other, and take the time from those that work. Before torch is
# imported, and inherited by what tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The same examples in every run, and no deadline: a verdict must not hang on chance or on a busy machine.
settings.register_profile("flatout", derandomize=True, deadline=None)
settings.load_profile("flatout")


def pytest_collection_finish() -> None:
    """What is there now stays: no collection of garbage walks over it again, nor does a forked process copy it for that."""
    gc.collect()
    gc.freeze()


class TorchState(NamedTuple):
    """The global switches of torch that a test could leave changed."""

    num_threads: int
    default_dtype: object
    is_deterministic: bool
    is_anomaly_detected: bool
    is_grad_enabled: bool


def read(torch: ModuleType) -> TorchState:
    return TorchState(
        num_threads=torch.get_num_threads(),
        default_dtype=torch.get_default_dtype(),
        is_deterministic=torch.are_deterministic_algorithms_enabled(),
        is_anomaly_detected=torch.is_anomaly_enabled(),
        is_grad_enabled=torch.is_grad_enabled(),
    )


def restore(torch: ModuleType, state: TorchState) -> None:
    torch.set_num_threads(state.num_threads)
    torch.set_default_dtype(state.default_dtype)
    torch.use_deterministic_algorithms(state.is_deterministic)
    torch.autograd.set_detect_anomaly(state.is_anomaly_detected)
    torch.set_grad_enabled(state.is_grad_enabled)


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Jobs that tests watch go into no store of the user's."""
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def torch_state_is_left_clean() -> Iterator[None]:
    """Fail a test that leaves torch's global state changed, and put it back for the next one.

    A test that does not import torch is not made to. When a test is the first to import it, what it leaves is compared
    with torch's defaults; only the number of threads, whose default is the machine's, is then taken as found.
    """
    torch = sys.modules.get("torch")
    before = read(torch) if torch else None
    yield
    torch = sys.modules.get("torch")
    if torch is None:
        return
    after = read(torch)
    if before is None:
        before = TorchState(after.num_threads, torch.float32, False, False, True)
    if after != before:
        restore(torch, before)
        changed = [name for name in TorchState._fields if getattr(before, name) != getattr(after, name)]
        pytest.fail(
            "the test left torch changed: "
            + ", ".join(f"{name} is {getattr(after, name)}, was {getattr(before, name)}" for name in changed)
            + "; restore it in the test, or in the code that it tests"
        )


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Iterator[None]:
    """Fail a test that leaves something of torch or Python patched, which later tests would see."""
    yield
    patching = sys.modules.get("flatout.core.runtime.patches")
    live = list(patching.Patches._live) if patching else []
    for patches in reversed(live):
        patches.undo()
    assert not live, f"the test left {len(live)} sets of patches installed; undo them"
