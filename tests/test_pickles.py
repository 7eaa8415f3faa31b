"""The package can be pickled together with functions that use it, as Ray, Dask and others do."""

from __future__ import annotations

import pickle

import flatout


def test_the_package_and_its_verbs_are_pickled_by_their_names() -> None:
    for module in (flatout, flatout.check, flatout.tune, flatout.shrink):
        assert pickle.loads(pickle.dumps(module)) is module
