from __future__ import annotations

import pytest

from flatout.core.errors import EditError
from flatout.tune.rewrite.calls import argument, call_in, keyword_argument, with_keywords

_NAMES = ("library.make",)
_ORDER = ("data", "size")


def _with(call: str, **values: str | None) -> str:
    module, found = call_in(f"from library import make\nx = {call}\n", {}, _NAMES)
    return with_keywords(module, found, values, _ORDER).code.partition("x = ")[2].rstrip("\n")


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("make(d, size=1)", "make(d, size=2, fast=True)"),
        ("make(d)", "make(d, size=2, fast=True)"),
        ("make()", "make(size=2, fast=True)"),
        ("make(d, size=1, old=3)", "make(d, size=2, fast=True)"),
        ("make(\n    d,\n    old=3,\n)", "make(\n    d,\n    size=2,\n    fast=True,\n)"),
        ("make(\n    d,\n    size=1,\n    old=3\n)", "make(\n    d,\n    size=2,\n    fast=True\n)"),
    ],
)
def test_keywords_are_set_and_taken_out_as_the_call_is_laid_out(call: str, after: str) -> None:
    assert _with(call, old=None, size="2", fast="True") == after


@pytest.mark.parametrize(("call", "why"), [("make(d, 1)", "by position"), ("make(d, **rest)", "unpacked")])
def test_an_argument_whose_place_is_not_certain_stays(call: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        _with(call, size="2")


def test_what_is_unpacked_may_hold_an_argument() -> None:
    _, call = call_in("import library\nlibrary.make(d, fast=True, **rest)\n", {}, _NAMES)
    assert keyword_argument(call, "size") is None and keyword_argument(call, "fast") is not None
    with pytest.raises(EditError, match="may hold 'size'"):
        argument(call, "size", 1)
