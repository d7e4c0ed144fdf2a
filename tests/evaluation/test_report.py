import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from marsjax.evaluation import report as reports


def a_row(tau=None, accuracy=0.9, speed=1.0, **more):
    row = {
        "accuracy": accuracy, "tokens_per_forward": speed, "tokens_per_forward_phrases": speed + 0.5,
        "tokens_per_forward_numbers": speed, "tokens_per_second": 1234.5, "identical_to_ar": 1.0, "problems": 64,
    }  # fmt: skip
    return ({} if tau is None else {"tau": tau}) | row | more


@pytest.fixture
def report():
    mars = [a_row(1.0), a_row(0.99, 0.89, 2.0), a_row(0.7, 0.5, 3.5)]
    answer = {
        "tau": 0.99, "text": "In all 3.", "tokens": 4, "forwards": 2, "chunks": [{"text": "In all 3.", "tokens": 4}],
        "html": '<span class="chunk c4">In all 3.</span>',
    }  # fmt: skip
    return {
        "ar": a_row(accuracy=0.91), "mars": mars, "control": [a_row(1.0, 0.91), a_row(0.7, 0.1, 2.9)], "best": mars[1],
        "example": {"question": "What is 1 + 2 <here>?", "expected": "3", "answers": [answer]},
        "machine": "test", "batch_size": 64, "summary": "Fine-tuned & decoded.",
    }  # fmt: skip


class Wellformed(HTMLParser):
    VOID = frozenset({"meta", "br", "hr", "img", "link"})

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        assert not any(name in ("src", "href") and value.startswith("http") for name, value in attrs if value)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_is_wellformed_selfcontained_and_complete(report, tmp_path):
    reports.write_html(tmp_path / "report.html", report)
    page = Wellformed()
    page.feed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.open == []
    for shown in ("2.00 tokens per forward pass", "MARS, τ = 0.99", "control, τ = 0.7", "What is 1 + 2 <here>?",
                  "τ=0.7", "89.0%", "1,234", "Fine-tuned & decoded."):  # fmt: skip
        assert shown in page.text
    assert page.text.count("before MARS, one token at a time") >= 2  # in the curve and in the table


def test_json_round_trip(report, tmp_path):
    reports.write_json(tmp_path / "report.json", report)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == report


def test_page_in_a_browser(report, tmp_path):
    """The page as a browser lays it out: curve and shading are there, nothing overflows."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine: the report is not opened in a browser")
    page = tmp_path / "report.html"
    reports.write_html(page, report)
    probe = """<script>addEventListener('load', () => {
      const curve = document.querySelector('svg').getBoundingClientRect();
      const shaded = getComputedStyle(document.querySelector('.answer .chunk')).backgroundColor;
      document.body.dataset.seen = JSON.stringify({width: Math.round(curve.width), height: Math.round(curve.height),
        shaded, overflow: document.documentElement.scrollWidth > innerWidth,
        rows: document.querySelectorAll('tr').length});
    })</script></body>"""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", probe), encoding="utf-8")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", "--window-size=1000,1400",
             f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000")  # fmt: skip
    done = subprocess.run([browser, *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    seen = json.loads(found[1].replace("&quot;", '"'))
    assert seen["width"] > 500
    assert seen["height"] > 200
    assert seen["shaded"] == "rgb(90, 174, 97)"
    assert not seen["overflow"]
    assert seen["rows"] == 1 + 1 + 3 + 2
