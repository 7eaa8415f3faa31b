"""Pictures of pages in a real Chromium: at 400 and 1400 pixels, light and dark.

    python docs/generate_pictures.py PAGE.html [PAGE.html ...]

Writes docs/images/pages/NAME-WIDTH-SCHEME.png for each page that `--html` wrote, as far down as a reader sees first, and says
where a page is wider than the screen. The pictures are for eyes: look at them before they are committed.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent / "images" / "pages"
HEIGHTS = {400: 2400, 1400: 2600}
"""Pixels of a picture at most, by its width."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    options = parser.parse_args()
    browser_path = next(filter(None, map(shutil.which, NAMES)), None)
    if browser_path is None:
        parser.error(f"no browser: none of {', '.join(NAMES)} is installed")
    FOLDER.mkdir(parents=True, exist_ok=True)
    wide: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for path in options.pages:
            for width, most in HEIGHTS.items():
                for scheme in ("light", "dark"):
                    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                    page.goto(path.resolve().as_uri())
                    size = page.evaluate(
                        "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
                    )
                    if size[0] > width:
                        wide.append(f"{path}: {size[0]} pixels wide on a screen of {width}")
                    name = f"{path.stem}-{width}-{scheme}.png"
                    clip = {"x": 0, "y": 0, "width": width, "height": min(most, size[1])}
                    page.screenshot(path=FOLDER / name, full_page=True, clip=clip)
                    page.close()
        browser.close()
    if wide:
        raise SystemExit("\n".join(wide))


if __name__ == "__main__":
    main()
