"""Pictures of pages in a real Chromium: at 400 and 1400 pixels, light and dark.

    python docs/generate_pictures.py PAGE.html [PAGE.html ...]
    python docs/generate_pictures.py --site

Writes docs/images/pages/NAME-WIDTH-SCHEME.png for each page that `--html` wrote, as far down as a reader sees first; or, with
`--site`, docs/images/site/ of four pages of the built site (`make docs`). Says where a page is wider than the screen. The
pictures are for eyes: look at them before they are committed.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

DOCS = Path(__file__).parent
HEIGHTS = {400: 2400, 1400: 2600}
"""Pixels of a picture at most, by its width."""
SITE_HEIGHT = 1400
SITE = {
    "start": "",
    "tutorial": "tutorials/where-does-the-time-go/",
    "rule": "rules/overhead.host-read/",
    "api": "reference/api-callbacks/",
}
NUM_COLOURS = 64
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line a request."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address under which a folder can be read, on this machine alone."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def draw(browser: Browser, address: str, stem: Path, heights: dict[int, int]) -> list[str]:
    """Write the pictures of one page; where it is wider than the screen, in words."""
    wide = []
    for width, most in heights.items():
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.goto(address)
            page.wait_for_load_state("networkidle")
            size = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
            if size[0] > width:
                wide.append(f"{address}: {size[0]} pixels wide on a screen of {width}")
            clip = {"x": 0, "y": 0, "width": width, "height": min(most, size[1])}
            drawn = Image.open(BytesIO(page.screenshot(full_page=True, clip=clip)))
            path = stem.with_name(f"{stem.name}-{width}-{scheme}.png")
            drawn.convert("RGB").quantize(NUM_COLOURS).save(path, optimize=True)
            page.close()
    return wide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="*")
    parser.add_argument("--site", action="store_true", help="pages of the built site")
    options = parser.parse_args()
    if options.site == bool(options.pages):
        parser.error("give pages, or --site")
    browser_path = next(filter(None, map(shutil.which, NAMES)), None)
    if browser_path is None:
        parser.error(f"no browser: none of {', '.join(NAMES)} is installed")
    folder = DOCS / "images" / ("site" if options.site else "pages")
    folder.mkdir(parents=True, exist_ok=True)
    wide: list[str] = []
    with sync_playwright() as driver, served(DOCS.parent / "site") as site:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for path in options.pages:
            wide += draw(browser, path.resolve().as_uri(), folder / path.stem, HEIGHTS)
        for name, place in SITE.items() if options.site else ():
            wide += draw(browser, site + place, folder / name, dict.fromkeys(HEIGHTS, SITE_HEIGHT))
        browser.close()
    if wide:
        raise SystemExit("\n".join(wide))


if __name__ == "__main__":
    main()
