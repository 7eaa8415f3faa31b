"""The HTML page in a real browser: the Chromium that is installed, without a window."""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from tests.page_reader import spoiled
from tests.report.html.test_scale import whole_page
from tests.report.scale_builder import FOUND, GIB, STAGES
from tests.report.test_ladder import TUNED

from flatout.core.records.evidence import Evidence
from flatout.core.records.failure import Goodput
from flatout.core.records.finding import Diagnosis
from flatout.report.html import html_report, ladder_html
from flatout.report.html.goodput import goodput_page
from flatout.report.parts.ladder import ladder_rows

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Seen(NamedTuple):
    """What happened while a page was shown."""

    page: Any
    messages: list[str]
    requests: list[str]


class Browser:
    """Opens pages in one Chromium, each with its own log."""

    def __init__(self, context: BrowserContext, folder: Path) -> None:
        self.context = context
        self.folder = folder

    def open(self, data: bytes, *, scheme: str = "light", width: int = 1200) -> Seen:
        path = self.folder / f"report{len(list(self.folder.glob('*.html')))}.html"
        path.write_bytes(data)
        page = self.context.new_page()
        seen = Seen(page, [], [])
        page.on("console", lambda message: seen.messages.append(message.text))
        page.on("pageerror", lambda error: seen.messages.append(str(error)))
        page.on("dialog", lambda dialog: (seen.messages.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: seen.requests.append(request.url))
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(path.as_uri())
        assert seen.requests == [path.as_uri()], "the page loads something"
        assert seen.messages == []
        return seen


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium with a fresh profile; skips where none is installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=found,
            args=list(FLAGS),
            env={**os.environ, "HOME": str(tmp_path_factory.mktemp("home"))},
        )
        yield Browser(context, tmp_path_factory.mktemp("pages"))
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.long
def test_every_part_is_seen_and_fits_the_screen(browser: Browser, drawn: bytes, scheme: str, width: int) -> None:
    page = browser.open(drawn, scheme=scheme, width=width).page

    for part in (
        "headline",
        "overview",
        "step",
        "causes",
        "cause-1",
        "cause-3",
        "roofline",
        "memory",
        "device",
        "ranks",
        "method",
    ):
        assert page.locator(f"#{part}").is_visible(), part
    assert all_within(page, ".data td, .data tbody th", width)
    for figure in ("timeline", "roofline", "memory0", "steps"):
        box = page.locator(f"svg.{figure}").bounding_box()
        assert box is not None and box["width"] > 300 and box["height"] > 90, figure
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_light_and_dark_differ_and_both_can_be_read(browser: Browser, drawn: bytes) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        page = browser.open(drawn, scheme=scheme).page
        grounds[scheme] = brightness(page, "#step", "background-color")
        for selector in ("#step h2", ".because", ".sub", ".gain", "svg.timeline text", ".source pre"):
            paint = "fill" if selector.startswith("svg") else "color"
            assert contrast(brightness(page, selector, paint), grounds[scheme]) >= 4.5, (scheme, selector)

    assert grounds["light"] > 0.8
    assert grounds["dark"] < 0.1


def brightness(page: Any, selector: str, paint: str) -> float:
    """Relative luminance of a colour as WCAG 2 defines it."""
    colour = page.locator(selector).first.evaluate(f"e => getComputedStyle(e).getPropertyValue('{paint}')")
    shares = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return float(0.2126 * red + 0.7152 * green + 0.0722 * blue)


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_bars_fill_their_row_in_proportion(browser: Browser, drawn: bytes) -> None:
    page = browser.open(drawn).page

    bar = page.locator("#step > .bar").bounding_box()
    spans = [s.bounding_box() for s in page.locator("#step > .bar span").all()]
    widths = [s["width"] for s in spans]
    assert sum(widths) == pytest.approx(bar["width"], rel=0.03)
    assert widths[2] / widths[0] == pytest.approx(14.5 / 9.1, rel=0.03)


def test_labels_of_the_roofline_do_not_cover_one_another(browser: Browser, drawn: bytes) -> None:
    page = browser.open(drawn).page

    boxes = [
        t.bounding_box()
        for t in page.locator("svg.roofline text").all()
        if "rotate" not in (t.get_attribute("transform") or "")
    ]
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            is_apart = (
                a["x"] + a["width"] <= b["x"] + 1
                or b["x"] + b["width"] <= a["x"] + 1
                or a["y"] + a["height"] <= b["y"] + 4
                or b["y"] + b["height"] <= a["y"] + 4
            )
            assert is_apart, (a, b)


def test_the_keyboard_reaches_the_causes(browser: Browser, drawn: bytes) -> None:
    page = browser.open(drawn).page

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.locator("#overview a").first.focus()
    page.keyboard.press("Enter")
    assert page.url.endswith("#cause-1")
    summary = page.locator("#cause-1 summary")
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("#cause-1 .about").is_visible()


def test_no_script_can_run_even_if_one_were_there(browser: Browser, drawn: bytes) -> None:
    data = drawn.replace(b"</main>", b"<script>document.title = 'owned'</script></main>")
    path = browser.folder / "injected.html"
    path.write_bytes(data)
    page = browser.context.new_page()

    page.goto(path.as_uri())

    assert page.title() != "owned"


def test_hostile_text_does_nothing(browser: Browser, full: Evidence, diagnosis: Diagnosis) -> None:
    text = "</title></style></svg><img src=http://127.0.0.1:9/x onerror=alert(1)><script>alert(1)</script>'\"$\\frac{1}{2}$"

    page = browser.open(html_report(spoiled(full, text), spoiled(diagnosis, text))).page

    assert page.locator("script, img, iframe, object, embed, link").count() == 0
    assert page.evaluate("document.querySelectorAll('style').length") == 1
    assert text in page.locator("#cause-1 .because").text_content()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200


@pytest.mark.parametrize("width", [390, 1200])
def test_a_ladder_is_seen_and_fits_the_screen(browser: Browser, width: int) -> None:
    page = browser.open(ladder_html(TUNED), width=width).page

    for part in ("headline", "section-1", "section-2", "section-3", "section-4"):
        assert page.locator(f"#{part}").is_visible(), part
    steps = [row.step_s[0] for row in ladder_rows(TUNED) if row.step_s is not None]
    assert_in_proportion(page, ".bars .parts", steps)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert all_within(page, ".bars .value, .bars .name, .data td", width)


def all_within(page: Any, selector: str, width: int) -> bool:
    """Whether all that is selected can be read without scrolling sideways."""
    boxes = [one.bounding_box() for one in page.locator(selector).all() if one.is_visible()]
    return bool(boxes) and all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_goodput_is_seen_and_fits_the_screen(browser: Browser, scheme: str, width: int) -> None:
    shares = {"as it is": 0.8, "saved in the background": 0.9}
    found = {
        name: Goodput(goodput=share, saving=0.0, lost=1 - share, down=0.0, interval_s=600.0, mtbf_s=3600.0)
        for name, share in shares.items()
    }
    curves = {name: [(8, share), (16, share - 0.1)] for name, share in shares.items()}
    page = browser.open(
        goodput_page(curves, title="80 % goodput, 8 devices", found=found), scheme=scheme, width=width
    ).page

    assert_in_proportion(page, ".bars .parts span:first-child", list(shares.values()))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert all_within(page, ".bars .value, .bars .name, .data td", width)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_plan_is_seen_and_fits_the_screen(browser: Browser, scheme: str, width: int) -> None:
    page = browser.open(whole_page(), scheme=scheme, width=width).page

    for part in ("headline", "layout", "step", "ranking", "memory", "pipeline", "failures", "method"):
        assert page.locator(f"#{part}").is_visible(), part
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert all_within(page, ".data td, .data tbody th", width)
    assert_in_proportion(page, "#step .bars .parts", [one.step.total_s for one in FOUND.best])
    assert_in_proportion(page, "#memory .bars .parts", [stage.total_bytes for stage in STAGES])
    limit, track = (page.locator(f"#memory {name}").first.bounding_box() for name in (".limit", ".parts"))
    assert (limit["x"] - track["x"]) / track["width"] == pytest.approx(80 * GIB / STAGES[0].total_bytes, rel=0.02)
    box = page.locator("svg.pipeline").bounding_box()
    assert box is not None and box["width"] > 300 and box["height"] > 90


def assert_in_proportion(page: Any, selector: str, sizes: list[float]) -> None:
    """The widths of what is selected are as those sizes."""
    widths = [one.bounding_box()["width"] for one in page.locator(selector).all()]
    assert widths == pytest.approx([widths[0] * size / sizes[0] for size in sizes], rel=0.02)


def test_a_screenshot_and_a_print_can_be_made(browser: Browser, drawn: bytes, tmp_path: Path) -> None:
    page = browser.open(drawn).page

    picture = page.screenshot(full_page=True)
    print_out = page.pdf(path=tmp_path / "report.pdf")

    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", picture[16:24])[0] == 1200
    assert len(set(picture)) > 200
    assert print_out.startswith(b"%PDF")
