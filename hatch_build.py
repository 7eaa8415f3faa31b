"""What the package's page on an index needs and the files cannot say: where the repository is.

Its address is FLATOUT_REPOSITORY, or else git's remote `origin` where that is an address for browsers. With it the package has
project URLs, and links and images of its README lead into the repository; without it the README stays as it is.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)\s]+)\)")
"""The end of a link, as the label may hold a picture."""
_IMAGES = (".png", ".svg", ".gif", ".jpg")


class CustomMetadataHook(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both in the metadata, which pyproject.toml declares as dynamic."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = repository(self.root)
        if address:
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{address}/blob/main/docs/index.md",
                "Changes": f"{address}/blob/main/CHANGELOG.md",
                "Issues": f"{address}/issues",
                "Security": f"{address}/security/policy",
            }
            text = with_absolute_links(text, address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def repository(folder: str) -> str:
    """The repository's address, without a slash at its end; '' where it is not known."""
    found = os.environ.get("FLATOUT_REPOSITORY", "")
    if not found:
        command = ["git", "-C", folder, "remote", "get-url", "origin"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:  # no git
            return ""
    return found.removesuffix("/").removesuffix(".git") if re.match(r"https://[^@\s]+$", found) else ""


def with_absolute_links(text: str, address: str) -> str:
    """The page with links to files of the repository in full: pages as they are shown, images as they are stored."""

    def absolute(match: re.Match[str]) -> str:
        view = "raw" if match[1].endswith(_IMAGES) else "blob"
        return f"]({address}/{view}/main/{match[1]})"

    return _LINK.sub(absolute, text)
