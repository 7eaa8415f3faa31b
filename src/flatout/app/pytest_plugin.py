"""The pytest plugin: `flatout.expect` for whole tests as a marker, and for regions inside them as a fixture.

Loaded by pytest at its start through the entry point 'flatout'; torch is imported when a test first asks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from flatout.tune.verify.expect.api import Expectation

_MARKER: Final = (
    "expect(forward_kernels=, backward_kernels=, peak_bytes=, host_waits=, graph_breaks=, recompilations=): "
    "fail the test when its call does more than that (flatout); without arguments, report what it does"
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `expect` with pytest."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run a marked test's call, without its fixtures' set-up, as a region. Its own failure goes before failed expectations."""
    markers = list(item.iter_markers("expect"))
    if not markers:
        return (yield)
    from flatout.core.errors import ExpectationFailed, UsageError

    try:
        region = _expectation(markers).titled(f"'{item.nodeid}'")
        observed = region.__enter__()
    except UsageError as error:
        pytest.fail(f"@pytest.mark.expect: {error}", pytrace=False)
    try:
        result = yield
    except BaseException as error:
        region.__exit__(type(error), error, error.__traceback__)
        raise
    failure = ""
    try:
        region.__exit__(None, None, None)
    except ExpectationFailed as error:
        failure = str(error)
    item.add_report_section("call", "expect", str(observed))
    if failure:
        pytest.fail(failure, pytrace=False)
    return result


@pytest.fixture
def expect() -> Callable[..., Expectation]:
    """`flatout.expect`, for regions and functions inside a test."""
    from flatout.tune.verify.expect.api import expect

    return expect


def _expectation(markers: list[pytest.Mark]) -> Expectation:
    """The limits of all markers of a test together; the closest one goes first."""
    from flatout.core.errors import UsageError
    from flatout.tune.verify.expect.api import expect

    limits: dict[str, Any] = {}
    for marker in reversed(markers):
        if marker.args:
            raise UsageError(f"expect{marker.args!r}: limits have names, as in @pytest.mark.expect(host_waits=0)")
        limits |= marker.kwargs
    return expect(**limits)
