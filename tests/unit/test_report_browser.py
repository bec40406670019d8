"""A report in a real browser: it loads nothing, fits its window, and can be read on white and on black."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from tests.unit.reports import write_run, write_trace

from thinwire.report.page import Subject, write_page
from thinwire.report.run import read_runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")

ASK = """
const shown = [...document.querySelectorAll("figure svg text")];
const placed = [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll") && !e.closest("svg"));
const widest = Math.max(...placed.map(e => e.getBoundingClientRect().right));
document.body.dataset.found = JSON.stringify({
  loaded: performance.getEntriesByType("resource").map(e => e.name),
  window: document.documentElement.clientWidth, widest: widest, scroll: document.documentElement.scrollWidth,
  texts: shown.length, visible: shown.filter(e => e.getBoundingClientRect().width > 0).length,
  ink: getComputedStyle(shown[0]).fill, card: getComputedStyle(document.querySelector("figure")).backgroundColor,
  figures: [...document.querySelectorAll("figure svg")].map(e => e.getBoundingClientRect().height),
  title: document.title,
});
"""


def chromium(*arguments: str) -> str:
    """Run Chromium without a window, where no name resolves."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=2000"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, timeout=120).stdout


def asked(page: Path, *arguments: str) -> Mapping[str, Any]:
    """What a script finds in a copy of the page that, unlike the page, lets it run."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    copy = page.with_name("asked.html")
    copy.write_text(text.replace("</body>", f"<script>{ASK}</script></body>"))
    found = re.search(r'data-found="([^"]*)"', chromium(*arguments, "--dump-dom", copy.as_uri()))
    assert found is not None
    answer: Mapping[str, Any] = json.loads(html.unescape(found[1]))
    return answer


def brightness(colour: str) -> float:
    return sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) / (3 * 255)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("browser")
    runs = [write_run(directory / name) for name in ("one", "another-" + "very-long-name" * 6)]
    write_trace(runs[0])
    return write_page(directory / "page", [Subject(run, unpredicted="not asked for") for run in read_runs(runs)])[0]


def test_it_loads_nothing_and_fits_its_window(page: Path) -> None:
    found = asked(page, "--window-size=1280,2000")
    assert found["title"].endswith("thinwire report")
    assert found["loaded"] == []
    assert found["scroll"] <= found["window"]
    assert found["widest"] <= found["window"] + 1
    assert found["texts"] == found["visible"] > 100
    assert len(found["figures"]) == 8 + 7 + 4
    assert all(height > 60 for height in found["figures"])
    assert brightness(found["ink"]) < 0.4 < 0.9 < brightness(found["card"])


@pytest.mark.slow
def test_it_is_dark_where_that_is_wanted(page: Path) -> None:
    found = asked(page, "--window-size=1280,2000", "--blink-settings=preferredColorScheme=0")
    assert brightness(found["card"]) < 0.2 < 0.7 < brightness(found["ink"])


@pytest.mark.slow
def test_it_fits_a_narrow_window(page: Path) -> None:
    found = asked(page, "--window-size=500,2000")
    assert found["scroll"] <= found["window"] <= 500


@pytest.mark.slow
def test_a_screenshot_shows_something(page: Path, tmp_path: Path) -> None:
    chromium("--window-size=1280,2000", f"--screenshot={tmp_path / 'shot.png'}", page.as_uri())
    pixels = matplotlib.image.imread(tmp_path / "shot.png")
    assert pixels.shape[:2] == (2000, 1280)
    colours = {tuple(colour) for colour in (pixels[::7, ::7, :3] * 15).round().reshape(-1, 3).tolist()}
    assert len(colours) > 20
