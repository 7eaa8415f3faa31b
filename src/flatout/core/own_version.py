"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

NOT_INSTALLED: Final = "0+source"


def own_version() -> str:
    """The installed version; '0+source' where the package runs from its source tree without being installed."""
    try:
        return version("flatout")
    except PackageNotFoundError:
        return NOT_INSTALLED
