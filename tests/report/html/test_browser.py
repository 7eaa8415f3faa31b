"""The HTML page in a real browser: the Chromium that is installed, without a window."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from tests.fleet_jobs import NOW_S, WEEK_S, finding, fleet, job
from tests.page_reader import spoiled
from tests.report.html.test_scale import whole_page
from tests.report.scale_builder import FOUND, GIB, STAGES
from tests.report.test_ladder import TUNED

from flatout.blocks.recording.job_store.opening import open_store
from flatout.check.fleet.prices import PriceList
from flatout.check.fleet.summary import summary_of
from flatout.core.records.evidence import Evidence
from flatout.core.records.failure import Goodput
from flatout.core.records.finding import Diagnosis
from flatout.core.records.fleet import FleetSummary
from flatout.core.records.job import JobRecord, NodeHealth
from flatout.report.html import html_report, ladder_html
from flatout.report.html.fleet import fleet_page
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


WORST = job(10**7, name="worst.py", seconds=72_000.0, findings=(finding((3.0, 4.0), line=77),), saved_fraction=0.75)


def whole_fleet(records: list[JobRecord] | None = None, *, number: int = 300) -> FleetSummary:
    """A summary with every section: slower workloads and a hot node, too."""
    hot = NodeHealth(num_samples=9, throttled_fraction=0.5, throttled_because="temperature (hardware)")
    slower = [
        job(10**6, workload="w", began_s=NOW_S - 1.5 * WEEK_S),
        job(10**6 + 1, workload="w", step_s=0.2, health=hot),
    ]
    return summary_of(
        [*fleet(number), WORST, *slower] if records is None else records,
        since_s=NOW_S - WEEK_S,
        until_s=NOW_S,
        prices=PriceList(2.5),
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_fleet_is_seen_and_fits_the_screen(browser: Browser, scheme: str, width: int) -> None:
    page = browser.open(fleet_page(whole_fleet(number=12)), scheme=scheme, width=width).page

    for part in ("headline", "jobs", "causes", "regressions", "nodes", "by-team", "by-model", "by-node", "method"):
        assert page.locator(f"#{part}").is_visible(), part
    first = page.locator("details.job").first
    assert first.locator("summary").inner_text().startswith("worst.py")
    assert "data.py:77" in first.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert all_within(page, ".data td, .data tbody th, .job-facts dd", width)
    ground = brightness(page, "#jobs", "background-color")
    for selector in ("details.job summary", ".job-facts dt", ".job-facts dd", ".tiles dd"):
        assert contrast(brightness(page, selector, "color"), ground) >= 4.5, selector


def test_each_job_of_a_fleet_opens_by_the_keyboard(browser: Browser) -> None:
    page = browser.open(fleet_page(whole_fleet())).page

    second = page.locator("details.job").nth(1)
    assert not second.locator(".job-facts").is_visible()
    second.locator("summary").focus()
    page.keyboard.press("Enter")
    assert second.locator(".job-facts").is_visible()
    page.locator("nav a", has_text="Sick nodes").click()
    assert page.url.endswith("#nodes")


def test_hostile_text_of_jobs_does_nothing(browser: Browser) -> None:
    text = "</title></style></details><img src=http://127.0.0.1:9/x onerror=alert(1)><script>alert(1)</script>'\""

    summary = whole_fleet()
    groups = {by: spoiled(group, text) for by, group in summary.groups.items()}
    page = browser.open(fleet_page(msgspec.structs.replace(spoiled(summary, text), groups=groups))).page

    assert page.locator("script, img, iframe, object, embed, link").count() == 0
    assert text in page.locator("details.job summary").first.text_content()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200


def test_a_fleet_of_ten_thousand_jobs_and_one_without_any_are_pages(browser: Browser) -> None:
    large = browser.open(fleet_page(whole_fleet([*fleet(10_000), WORST]))).page
    empty = browser.open(fleet_page(whole_fleet([]))).page

    assert large.locator("details.job").first.locator("summary").inner_text().startswith("worst.py")
    assert large.locator("details.job").count() == 50
    assert empty.locator("#headline").inner_text() == "No job ran in this time"


def test_the_served_fleet_opens_by_the_address_that_is_printed(browser: Browser, tmp_path: Path) -> None:
    open_store(tmp_path / "fleet").write(WORST)
    command = [sys.executable, "-m", "flatout.app.cli", "fleet", "serve", "--store", tmp_path / "fleet", "--port", "0"]
    process = subprocess.Popen([*command, "--days", "3660"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        page = browser.context.new_page()
        messages: list[str] = []
        page.on("console", lambda message: messages.append(message.text))
        page.goto(found[0])

        assert "token" not in page.url
        assert page.locator("details.job").first.locator("summary").inner_text().startswith("worst.py")
        page.reload()
        assert page.locator("#headline").is_visible()
        assert [m for m in messages if "favicon" not in m and "401" not in m and "404" not in m] == []
    finally:
        process.terminate()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


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
