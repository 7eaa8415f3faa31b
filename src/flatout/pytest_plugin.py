"""pytest: promises of `flatout.guarantee` about whole tests, by a marker, and about regions in them, by a fixture.

Loaded by pytest at its start through the entry point 'flatout'; torch is imported when a test first asks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from flatout.verification.guarantee import Guarantee

_MARKER: Final = (
    "guarantee(forward_kernels=, backward_kernels=, peak_bytes=, host_waits=, graph_breaks=, recompilations=): "
    "fail the test when its call does more than that (flatout); without arguments, tell what it does"
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run a marked test's call, without its fixtures' set-up, as a region. Its own failure goes before broken promises."""
    marked = list(item.iter_markers("guarantee"))
    if not marked:
        return (yield)
    from flatout.errors import PromiseBroken, UsageError

    try:
        region = _promised(marked).titled(f"'{item.nodeid}'")
        seen = region.__enter__()
    except UsageError as error:
        pytest.fail(f"@pytest.mark.guarantee: {error}", pytrace=False)
    try:
        result = yield
    except BaseException as error:
        region.__exit__(type(error), error, error.__traceback__)
        raise
    broken = ""
    try:
        region.__exit__(None, None, None)
    except PromiseBroken as error:
        broken = str(error)
    item.add_report_section("call", "guarantee", str(seen))
    if broken:
        pytest.fail(broken, pytrace=False)
    return result


@pytest.fixture
def guarantee() -> Callable[..., Guarantee]:
    """`flatout.guarantee`, for regions and functions inside a test."""
    from flatout.verification.guarantee import guarantee

    return guarantee


def _promised(marked: list[pytest.Mark]) -> Guarantee:
    """The promises of all marks of a test; the closest one goes first."""
    from flatout.errors import UsageError
    from flatout.verification.guarantee import guarantee

    promised: dict[str, Any] = {}
    for mark in reversed(marked):
        if mark.args:
            raise UsageError(f"guarantee{mark.args!r}: limits have names, as in @pytest.mark.guarantee(host_waits=0)")
        promised |= mark.kwargs
    return guarantee(**promised)
