"""The page of a report: whole, without a script or a network, its names never markup; and in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.running import deltackpt

from deltackpt.report.arrivals import Arrival
from deltackpt.report.history import History, read_history
from deltackpt.repository import Repository

pytest.importorskip("matplotlib")
from deltackpt.report.page import BEGIN, page
from deltackpt.report.plots import sections

VOID = {"meta", "br", "image", "hr", "img", "link", "input"}
ODD = "$x^2$ <b>&amp;"


class Checked(HTMLParser):
    """Elements nest, and nothing refers outside of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {*VOID, "tr", "td", "th"}:
            self.open.append(tag)
        for name, value in attrs:
            self.ids += [value or ""] if name == "id" else []
            assert name not in ("src", "onclick", "onload")
            assert not (name.endswith("href") and not (value or "").startswith(("#", "data:image/png;base64,")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def history(report_repo: Path) -> History:
    lags = tuple(Arrival("vllm=<script>", step, 0.5 + step, 0.1) for step in range(5))
    found = read_history(Repository.open(report_repo), ulp=True, arrivals=lags)
    return replace(found, milestones=tuple(replace(m, name=ODD if m.name else "") for m in found.milestones))


def test_the_page_is_whole_and_asks_for_nothing(history: History) -> None:
    made = page(history)
    assert made.startswith(BEGIN)
    checked = Checked()
    checked.feed(made)
    assert checked.open == []
    assert len(set(checked.ids)) == len(checked.ids)
    assert "<script" not in made
    assert "default-src &#x27;none&#x27;" in made or "default-src 'none'" in made
    assert not re.search(r"https?://(?!www\.w3\.org/)", re.sub(r'xmlns[:\w]*="[^"]*"', "", made))
    assert "\u202e" not in made
    assert "math" not in made  # numbers of axes are text, not formulas
    assert escape(ODD) in made  # and as it is, in table and figure
    assert made == page(history)  # the same bytes for the same history


def test_every_figure_has_its_unit_and_a_table(history: History) -> None:
    found = sections(history)
    keys = ["density", "layers", "bytes", "bits", "encodings", "ulp", "restore", "marks", "arrivals", "storage"]
    assert [section.key for section in found] == keys
    checked = Checked()
    checked.feed(page(history))
    for section in found:
        assert section.svg.startswith("<svg viewBox=")
        assert not re.search(r"#0102a\d|#01020[34]", section.svg)  # every color is the page's
        assert all(len(row) == len(section.headers) for row in section.rows)
        assert section.title in checked.text
    assert [row[3] for row in found[0].rows][1:] == [100 * (s.density or 0) for s in history.steps[1:]]


def test_one_step_none_and_two_thousand(history: History) -> None:
    one = replace(history, steps=history.steps[:1], restore=history.restore[:1], tables=(), milestones=(), ulp=())
    assert "Density" in page(one)
    assert "no step yet" in page(replace(history, steps=()))
    steps = tuple(replace(history.steps[1], step=i, id=f"{i:064}") for i in range(2000))
    assert page(replace(history, steps=steps)).count("<tr>") > 6000


def test_the_command_replaces_reports_and_nothing_else(report_repo: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    for _ in range(2):
        done = deltackpt("report", report_repo, "-o", out)
        assert (done.out, done.err, done.status) == ("", f"{out}: 7 steps\n", 0)
        assert out.read_text().startswith(BEGIN)
    mine = tmp_path / "mine.html"
    mine.write_text("<!DOCTYPE html>mine")
    done = deltackpt("report", report_repo, "-o", mine)
    assert (done.status, mine.read_text()) == (7, "<!DOCTYPE html>mine")
    assert deltackpt("report", report_repo, "-o", tmp_path).status == 2
    assert deltackpt("report", report_repo, "-o", tmp_path / "no" / "page.html").status in (8, 9)
    assert deltackpt("report", report_repo, "-o", "s3://bucket/page.html").status == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "page.html"]


def test_without_matplotlib_the_hint_says_what_to_install(report_repo: Path, tmp_path: Path) -> None:
    none = "import sys; sys.modules['matplotlib'] = None"
    done = deltackpt("report", report_repo, "-o", tmp_path / "page.html", before=none)
    assert done.status == 2
    assert "pip install 'matplotlib" in done.err
    assert deltackpt("report", report_repo, "--text", before=none).status == 0
    assert list(tmp_path.iterdir()) == []


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def browse(profile: Path, *options: str) -> str:
    line = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", *options,
    ]  # fmt: skip
    return subprocess.run(line, capture_output=True, check=True, timeout=240).stdout.decode()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_in_a_browser_light_dark_narrow_and_printed(history: History, tmp_path: Path) -> None:
    from matplotlib.image import imread

    made = tmp_path / "page.html"
    made.write_text(page(history))
    corners = {}
    for theme in (0, 1):  # dark, light
        shot = tmp_path / f"{theme}.png"
        dark = f"--blink-settings=preferredColorScheme={theme}"
        browse(tmp_path / "profile", dark, "--window-size=1200,1600", f"--screenshot={shot}", made.as_uri())
        pixels = imread(shot)[..., :3]
        corners[theme] = float(pixels[2, 2].mean())
        assert pixels.std() > 0.05  # there is something on it
    assert corners[0] < 0.2 < 0.9 < corners[1]
    browse(tmp_path / "profile", f"--print-to-pdf={tmp_path / 'page.pdf'}", made.as_uri())
    assert (tmp_path / "page.pdf").read_bytes()[:5] == b"%PDF-"
    # On a phone nothing sticks out: measured by a page around it, which may run a script.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe id=f style="width:360px;height:700px;border:0" srcdoc="{escape(made.read_text())}"></iframe>'
        '<script>onload=()=>{let d=document.getElementById("f").contentDocument;let w=0;'
        'for(let e of d.querySelectorAll("section,svg,dl,header"))w=Math.max(w,e.getBoundingClientRect().right);'
        'let t=[...d.querySelectorAll("svg text")].map(e=>e.getBoundingClientRect().height);'
        'document.body.dataset.seen=[d.documentElement.scrollWidth,w,d.querySelectorAll("svg").length,Math.min(...t)]}'
        "</script>"
    )
    seen = re.search(r'data-seen="([^"]*)"', browse(tmp_path / "profile", "--dump-dom", frame.as_uri()))
    assert seen is not None
    width, right, figures, smallest = map(float, seen[1].split(","))
    assert (width, figures) == (360, 10)
    assert right <= 360
    assert smallest >= 7  # CSS pixels: small print, and none is smaller
