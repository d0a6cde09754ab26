"""The report in headless Chromium: it draws, filters and obeys its own policy. Skipped where there is no Chromium."""

import json

import pytest

from cukit.runs.metrics import MetricsLogger
from cukit.runs.report import write_report

from .browser import CHROMIUM, Browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt install chromium)")]
HOSTILE = "</script><img src=x onerror=document.title='taken'><b>bold</b>"


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """(page of one run, page of two): 40 steps of 8 completions, and an evaluation; texts are hostile."""
    base = tmp_path_factory.mktemp("runs")
    for number, name in enumerate(("first", f"second {HOSTILE.replace('/', '')}")):
        logger = MetricsLogger(base / name)
        for step in range(1, 41):
            times = {"time/generate": 0.5, "time/train": 0.25, "step_time": 1.0, "num_tokens": 100.0 * step}
            row = {"reward": step / 40 + number, "loss": -1.0, "grad_norm": None if step == 9 else 2.0, HOSTILE: step}
            logger.log(step, row | times)
            tokens, logprobs = ["long word ", HOSTILE, "no" * 300], [-0.05, -1.2, -5.0]
            text = f"answer {step} " + "".join(tokens)
            entry = {"prompt": [{"role": "user", "content": f"{HOSTILE} {step}"}], "completion": text}
            entry |= {"advantage": 1.0, "finish_reason": "stop", "length": 3, "tokens": tokens, "logprobs": logprobs}
            logger.log_completions(step, [entry | {"rewards/exact": float(i % 2)} for i in range(8)])
        logger.log(40, {"eval/accuracy": 0.5})
        entry = {"prompt": "q", "completion": "evaluated", "rewards/exact": 1.0, "finish_reason": "length", "length": 9}
        logger.log_completions(40, [entry])
        logger.close()
    runs = sorted(map(str, base.glob("*")))
    return write_report(runs[:1], base / "one.html"), write_report(runs, base / "two.html")


def check_calm(browser):
    """Nothing was refused, thrown or asked for, and no hostile text became an element."""
    assert browser.problems == [] and [url for url in browser.requests if not url.startswith("file://")] == []
    assert len(browser.requests) == 1
    assert browser.value("document.title") != "taken"
    assert browser.value("document.querySelectorAll('img, main b:not(figcaption b, .group b, .tip b)').length") == 0


def test_curves_are_drawn(browser, pages):
    browser.open(pages[1])
    assert browser.value("document.documentElement.dataset.ready") == "yes"
    assert browser.value("document.querySelectorAll('#charts figure').length") == 4
    assert browser.value("document.querySelectorAll('#charts path.line').length") == 8
    # a value that is not finite is a gap: two pieces, each with its own M
    gaps = "[...document.querySelectorAll('#charts figure')].find(f => f.textContent.includes('Gradient norm'))"
    assert browser.value(f"{gaps}.querySelector('path.line').getAttribute('d').match(/M/g).length") == 2
    browser.set("smoothing", "0.9")
    assert browser.value("document.querySelectorAll('#charts path.raw').length") == 6  # not of the accuracy, one point
    for axis in ("tokens", "time", "step"):
        browser.set("axis", axis)
        assert browser.value("document.querySelectorAll('#charts path.line').length") == 14
    browser.set("more", HOSTILE)
    assert browser.value("document.querySelector('#charts figure:last-child b').textContent") == HOSTILE
    browser.value("document.querySelector('#legend button').click()")
    assert browser.value("document.querySelectorAll('#charts path.line:not(.raw)').length") == 5
    assert browser.value("document.querySelectorAll('#phases path.area').length") == 6
    check_calm(browser)


def test_values_appear_under_the_pointer_and_the_keys(browser, pages):
    browser.open(pages[1])
    browser.value("document.querySelectorAll('#charts svg')[1].scrollIntoView({ block: 'center' })")
    box = browser.value("JSON.stringify(document.querySelectorAll('#charts svg')[1].getBoundingClientRect())")
    box = json.loads(box)
    browser.call(
        "Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + box["width"] - 11, y=box["y"] + box["height"] / 2
    )
    browser.until("document.querySelectorAll('#charts .tip')[1].textContent.includes('step 40')")
    tip = "document.querySelectorAll('#charts .tip')[1]"
    assert browser.value(f"[...{tip}.querySelectorAll('b')].map(value => value.textContent)") == ["1", "2"]
    assert "<img src=x" in browser.value(f"{tip}.textContent")
    browser.value("document.querySelectorAll('#charts svg')[1].focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft", code="ArrowLeft")
    browser.until("document.querySelectorAll('#charts .tip')[1].textContent.includes('step 39')")
    check_calm(browser)


def found(browser, count):
    browser.until(f"document.getElementById('found').textContent.startsWith('{count} of ')")


def test_completions_are_found_and_shaded(browser, pages):
    browser.open(pages[1])
    found(browser, 642)
    assert browser.value("document.querySelectorAll('details.row').length") == 24
    browser.value("document.getElementById('show-more').click()")
    assert browser.value("document.querySelectorAll('details.row').length") == 48
    browser.set("text", "ANSWER 7 ")
    found(browser, 16)
    browser.set("least", "1")
    found(browser, 8)
    browser.set("run", "0")
    found(browser, 4)
    for id in ("text", "least", "run"):
        browser.set(id, "")
    browser.set("from", "40")
    found(browser, 18)
    browser.set("kind", "eval")
    browser.set("reason", "length")
    found(browser, 2)
    browser.set("kind", "train")
    browser.set("reason", "")
    browser.set("order", "low")
    found(browser, 16)
    browser.value("document.querySelector('details.row summary').click()")
    browser.until("document.querySelector('details.row .inside')")
    said = "document.querySelector('.inside .said:last-of-type')"
    classes = browser.value(f"[...{said}.children].map(token => token.className).join(' ')")
    assert classes == "h0 h2 h4" and HOSTILE in browser.value(f"{said}.textContent")
    browser.value(f"{said}.children[2].click()")
    assert "0.6738 %" in browser.value("document.querySelector('.inside .numbers').textContent")
    browser.value("document.getElementById('heat').click()")
    assert browser.value(f"getComputedStyle({said}.children[2]).backgroundColor") == "rgba(0, 0, 0, 0)"
    check_calm(browser)


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.parametrize("place", [0, 1])
def test_no_horizontal_scroll(browser, pages, place, width):
    browser.open(pages[place], width=width, height=800)
    browser.value("document.querySelectorAll('details').forEach((row) => (row.open = true))")
    browser.until("document.querySelector('.inside')")
    assert browser.value("document.documentElement.scrollWidth") <= width
    check_calm(browser)


def contrast(browser, selector):
    """WCAG's ratio of a text's colour to the card behind it."""
    return browser.value(
        """((selector) => {
          const numbers = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
          const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
          const light = (color) =>
            numbers(color).reduce((sum, c, i) => sum + linear(c / 255) * [0.2126, 0.7152, 0.0722][i], 0);
          const element = document.querySelector(selector);
          let behind = element;
          while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
          const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(light);
          return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        })"""
        + f"({json.dumps(selector)})"
    )


@pytest.mark.parametrize("dark", [False, True])
def test_texts_can_be_read_in_both_modes(browser, pages, dark):
    browser.open(pages[0], dark=dark)
    paper = browser.value("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(22, 24, 27)" if dark else "rgb(250, 249, 247)")
    browser.value("document.querySelector('details.row').open = true")
    browser.until("document.querySelector('.inside .h4')")
    selectors = ["h1", ".headline", ".brand", ".tile dd", ".tile .below", ".chart .about", ".chart .value", "tbody th"]
    selectors += [
        ".scale .h0",
        ".scale .h1",
        ".scale .h2",
        ".scale .h3",
        ".scale .h4",
        ".inside .h4",
        ".chip",
        "footer",
    ]
    low = {selector: ratio for selector in selectors if (ratio := contrast(browser, selector)) < 4.5}
    assert not low


def test_curves_show_without_javascript(browser, pages):
    browser.open(pages[0], javascript=False)
    html = browser.call("DOM.getDocument", depth=1)["root"]["nodeId"]
    curves = browser.call("DOM.querySelectorAll", nodeId=html, selector="noscript polyline")["nodeIds"]
    assert len(curves) == 5  # four charts, and the gap in one
    assert browser.call("DOM.getBoxModel", nodeId=curves[1])["model"]["width"] > 100
