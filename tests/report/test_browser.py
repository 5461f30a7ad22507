"""The report in headless Chromium, wide and narrow, light and dark, without a network.

``make test-browser`` runs it; Chromium has to be installed. The pictures are kept where
``TORCHGLB_SCREENSHOTS`` points to, to be looked at.
"""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from analyst_tables import FORMULA, clicks
from fake_records import fake_record

from torchglb.cli import main
from torchglb.report import write_report
from torchglb.simulate import Record

pytestmark = pytest.mark.browser

#: what is asked of a page: does it need to be scrolled sideways, is everything there, which colours
MEASURE = """
(() => {
  const style = getComputedStyle(document.body);
  const outside = [...document.querySelectorAll('h1,h2,p,img,figcaption,li,.scroll,pre')]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.tagName);
  return {
    width: innerWidth, page: document.documentElement.scrollWidth, outside,
    images: [...document.images].map(i => i.naturalWidth),
    text: style.color, paper: style.backgroundColor,
    resources: performance.getEntriesByType('resource').map(e => e.name),
    letters: parseFloat(style.fontSize),
  };
})()
"""


class Browser:
    """Chromium, by its own protocol over a pair of pipes."""

    def __init__(self, program, profile):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run"
        command = (
            f"exec {program} {flags} --user-data-dir={profile} 3<&{to_browser} 4>&{from_browser}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self.requests = 0, b"", []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    _session = None

    def __call__(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def wait_for(self, event):
        while self._next().get("method") != event:
            pass

    def _next(self):
        while b"\0" not in self._rest:
            data = os.read(self._read, 1 << 16)
            assert data, "Chromium has ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message

    def close(self):
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._read)
        os.close(self._write)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program, "Chromium is not installed"
    found = Browser(program, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    place = tmp_path_factory.mktemp("report")
    title = "A title that is long enough to need two lines, with <b>markup</b> & " + "x" * 80
    directory = fake_record(place / "run", S=(4.0, 6.0, 8.0, 10.0), title=title)
    return write_report(Record.open(directory), place / "report.html")


@pytest.fixture(scope="module")
def analysis(tmp_path_factory):
    place = tmp_path_factory.mktemp("analysis")
    path = place / ("clicks with <b>markup</b> " + "x" * 60 + ".csv").replace("/", "")
    clicks(400).to_csv(path, index=False)
    words = ["--formula", FORMULA, "--family", "bernoulli", "--burn-in", "100"]
    words += ["--intervals", "both", "--contrast", "C(arm)[B] - C(arm)[A]", "--out", str(place)]
    assert main(["analyse", str(path), *words]) == 0
    return place / "report.html"


def brightness(color):
    red, green, blue = (float(part) for part in color.strip("rgba()").split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", ["report", "analysis"])
def test_the_report_is_read_at_any_width_and_in_the_dark(browser, request, page, width, scheme):
    report = request.getfixturevalue(page)
    browser("Network.enable")
    browser("Page.enable")
    browser(
        "Network.emulateNetworkConditions",
        offline=True,
        latency=0,
        downloadThroughput=0,
        uploadThroughput=0,
    )
    metrics = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
    browser("Emulation.setDeviceMetricsOverride", **metrics)
    browser(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    browser.requests.clear()
    browser("Page.navigate", url=report.as_uri())
    browser.wait_for("Page.loadEventFired")
    found = browser("Runtime.evaluate", expression=MEASURE, returnByValue=True)["result"]["value"]
    shot = browser("Page.captureScreenshot", captureBeyondViewport=True)["data"]
    if place := os.environ.get("TORCHGLB_SCREENSHOTS"):
        Path(place).mkdir(parents=True, exist_ok=True)
        (Path(place) / f"{page}-{width}-{scheme}.png").write_bytes(base64.b64decode(shot))
    assert found["width"] == width
    assert found["page"] <= width, found  # tables scroll within themselves
    assert found["outside"] == []
    assert len(found["images"]) == (3 if page == "report" else 2)
    assert min(found["images"]) > 0
    assert found["letters"] >= 14
    dark = scheme == "dark"
    assert (brightness(found["paper"]) < 0.2) is dark
    assert (brightness(found["text"]) > 0.7) is dark
    assert all(url.startswith(("file:", "data:")) for url in browser.requests + found["resources"])
