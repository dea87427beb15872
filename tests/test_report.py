"""The report: what it says, that it stands alone, and that a browser shows it."""

import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import toy
from click.testing import CliRunner

from experiments.__main__ import main
from experiments._compare import run_config
from experiments._config import load_config
from experiments._report import write_report
from experiments._results import read_all

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.references, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href"):
                self.references.append(value)

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as monkeypatch:
        path = toy.install("toy_report", root, monkeypatch)
        run_config(load_config(path), root / "results")
        run_config(load_config(path.rename(root / "toy_broken.toml"), ["kind=diverges"]), root / "results")
    for path in CONFIGS:
        run_config(load_config(path, ["steps=2", "seeds=2"]), root / "results")
    return root / "results"


@pytest.fixture(scope="module")
def page(results):
    return write_report(read_all(results), results / "index.html")


@pytest.fixture(scope="module")
def parsed(page):
    return _Page(page.read_text())


def test_every_block_stands_there_with_its_reason_and_verdict(results, parsed):
    text = " ".join(" ".join(parsed.text).split())
    for found in read_all(results):
        data = found.records[-1].data
        assert data["config"]["title"] in text
        assert " ".join(data["config"]["finding"].split()) in text
        for name, why in data["blocks"].items():
            assert name in text
            assert why in text


def test_what_users_write_is_escaped(page):
    assert "<b>&amp;</b>" not in page.read_text()
    assert "A toy &lt;b&gt;&amp;amp;&lt;/b&gt;" in page.read_text()


def test_the_page_stands_alone(page, parsed):
    assert [reference for reference in parsed.references if not reference.startswith(("#", "data:"))] == []
    assert "@import" not in page.read_text()
    assert re.findall(r"url\((?!#)", page.read_text()) == []


def test_ids_are_unique_and_every_reference_has_one(parsed):
    assert [name for name, count in Counter(parsed.ids).items() if count > 1] == []
    targets = {reference[1:] for reference in parsed.references if reference.startswith("#")}
    assert targets <= set(parsed.ids)


def test_the_same_records_give_the_same_page(results, page, tmp_path):
    again = write_report(read_all(results), tmp_path / "index.html")
    assert again.read_bytes() == page.read_bytes()


def test_a_run_that_broke_off_is_told(parsed):
    assert "its loss was not finite" in " ".join(parsed.text)


def test_the_report_needs_no_torch(results, tmp_path):
    program = textwrap.dedent(f"""
        import sys
        for name in ("torch", "toolkit", "sklearn", "pydantic"):
            sys.modules[name] = None
        from experiments.__main__ import main
        main(["report", "--results", {str(results)!r}, "--output", {str(tmp_path / "page.html")!r}])
    """)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_without_records_the_command_says_what_to_do(tmp_path):
    done = CliRunner().invoke(main, ["report", "--results", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr == f"error: {tmp_path}: no records there; run a config first\n"


@pytest.mark.browser
@pytest.mark.filterwarnings("ignore")
def test_a_browser_shows_every_picture_without_an_error(page):
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no chromium and chromedriver on this machine")
    selenium = pytest.importorskip("selenium.webdriver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1100,900",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    try:
        browser.get(page.as_uri())
        assert browser.title == "What each stop-gradient does"
        assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
        browser.execute_script("document.querySelectorAll('details').forEach(details => details.open = true)")
        boxes = browser.execute_script(
            "return [...document.querySelectorAll('figure > svg')].map(svg => {"
            "  const box = svg.getBoundingClientRect(), drawn = svg.getBBox();"
            "  return [box.width, box.height, drawn.width, drawn.height, svg.checkVisibility()]; })"
        )
        pictures = len(re.findall(r"<figure>", page.read_text()))
        assert len(boxes) == pictures > 4 * len(CONFIGS)
        for width, height, drawn_width, drawn_height, visible in boxes:
            assert visible
            assert min(width, height, drawn_width, drawn_height) > 40
        overflow = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
        assert overflow <= 0
    finally:
        browser.quit()
