"""The pages in a real browser: headless Chromium, driven by Playwright (extra `browser`)."""

import contextlib
import shutil

import pytest
from made_up_attention import attention
from test_curves import write_run

from flaxformer_mt.plotting.attention_page import AttentionPicture
from flaxformer_mt.plotting.curves import plot_curves

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 740}

# Every visible text whose contrast with its background is below 4.5 (WCAG 2.2, 1.4.3).
CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, bottom) => top.slice(0, 3)
    .map((c, i) => c * top[3] + bottom[i] * (1 - top[3])).concat(1);
  const luminance = (color) => {
    const [r, g, b] = color.map((c) =>
      c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      layers.push(rgba(getComputedStyle(e).backgroundColor));
    }
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    return layers.reduceRight((below, layer) => over(layer, below),
      dark ? [18, 18, 18, 1] : [255, 255, 255, 1]);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const failures = [];
  let count = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const style = getComputedStyle(element);
    if (!walker.currentNode.data.trim()) continue;
    if (element.closest("script, style, noscript, .unseen")) continue;
    if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    count += 1;
    const below = background(element);
    const text = element.closest("svg") ? style.fill : style.color;
    const pair = [luminance(over(rgba(text), below)), luminance(below)].sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (contrast < 4.5) failures.push(`${walker.currentNode.data.trim()}: ${contrast.toFixed(2)}`);
  }
  return { count, failures };
}"""
OVERFLOW = """() => [document.documentElement.scrollWidth, innerWidth]"""
FOCUSED = """() => {
  const element = document.activeElement;
  const group = element.closest("[role=group], fieldset") || element;
  return group.id || element.id || element.tagName.toLowerCase();
}"""
FOCUS_IS_VISIBLE = """() => {
  const shown = (element) => element && getComputedStyle(element).outlineStyle !== "none";
  const element = document.activeElement;
  return shown(element) || shown(element.nextElementSibling);
}"""


def executable():
    """Returns the path of an installed browser, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium; without one, the tests are skipped."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install 'flaxformer_mt[browser]'"
    )
    path = executable()
    if path is None:
        pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=path)
        yield running
        running.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page from a file; its errors, and all that it requests, fail the test."""
    with contextlib.ExitStack() as stack:
        problems = []

        def load(text, size=WIDE, **options):
            file = tmp_path / "page.html"
            file.write_text(text, encoding="utf-8")
            context = browser.new_context(viewport=size, **options)
            stack.callback(context.close)
            page = context.new_page()
            page.on("console", lambda message: problems.append(message.text))
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("request", lambda request: problems.append(request.url))
            page.goto(file.as_uri())
            assert problems.pop(0) == file.as_uri()
            return page

        yield load
        assert problems == []


SOURCE, TARGET = "the small dogs are running", "die kleinen Hunde rennen"


def attention_page(source=SOURCE, target=TARGET, **options):
    return AttentionPicture(attention(source, target, **options)).to_html()


def parity_page():
    """The report of two sections, with a difference."""
    pytest.importorskip("torch")
    from flaxformer_mt import parity
    from flaxformer_mt.parity.reports.comparison import Row
    from flaxformer_mt.parity.reports.report import Report

    site = "decoder/layers/1/cross_attention/output"
    rows = (
        Row("source/embedding", (2, 13, 512), 0.0, 0.0, 1e-10),
        Row("encoder/layers/0/self_attention/scores", (2, 8, 13, 13), 2e-16, 1e-16, 1e-10),
        Row(site, (2, 9, 512), 0.25, 0.5, 1e-10),
        Row("logits", (2, 9, 32000), 0.5, 0.5, 1e-10, accepted="rounded tables"),
        Row("gradient/transformer.encoder.layers.0.self_attn.in_proj_weight", (1536, 512), 0, 0, 1),
    )
    cause = parity.Diagnosis("mask sign", "the reference hides what ours shows", 1e-15)
    return Report("annotated", "float64", rows, diagnosis=cause).to_html()


def curves_page(folder):
    """The training curves of two runs."""
    pytest.importorskip("matplotlib")
    for name in ("one", "a_run_of_a_rather_long_name_with_parts"):
        write_run(folder / name)
    return plot_curves(sorted(folder.iterdir())).to_html()


PAGES = {
    "attention": lambda folder: attention_page(),
    "parity": lambda folder: parity_page(),
    "curves": curves_page,
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_all_text_can_be_read(opened, name, scheme, tmp_path_factory):
    text = PAGES[name](tmp_path_factory.mktemp("runs"))
    page = opened(text, color_scheme=scheme, reduced_motion="reduce")
    found = page.evaluate(CONTRAST)
    assert found["count"] > 30
    assert found["failures"] == []


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [375, 800, 1280])
def test_nothing_is_wider_than_the_screen(opened, name, width, tmp_path_factory):
    page = opened(PAGES[name](tmp_path_factory.mktemp("runs")), {"width": width, "height": 740})
    content, screen = page.evaluate(OVERFLOW)
    assert content <= screen == width


def controls(page):
    """Presses Tab until the focus returns, and returns the ids of the controls that had it."""
    found = []
    for _ in range(50):
        page.keyboard.press("Tab")
        name = page.evaluate(FOCUSED)
        if name == "body" or name in found:
            return found
        assert page.evaluate(FOCUS_IS_VISIBLE), name
        found.append(name)
    raise AssertionError(found)


def test_every_control_is_reached_and_worked_by_the_keyboard(opened):
    page = opened(attention_page(), reduced_motion="reduce")
    all_controls = ["theme", "kinds", "columns", "rows", "heads", "matrix", "summary"]
    assert controls(page) == all_controls

    def text(selector):
        return page.inner_text(selector)

    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowLeft")
    assert text("#rows-name") == "Next token"
    page.keyboard.press("ArrowLeft")
    assert (text("#rows-name"), text("#columns-name")) == ("Source", "Source")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert text("#readout").startswith("small is attended to by ")
    page.keyboard.press("End")
    assert text("#readout").startswith("</s> is attended to by ")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert text("#readout").startswith("small attends to ")
    page.keyboard.press("Escape")
    assert text("#readout").startswith("Point at a token")
    page.keyboard.press("Tab")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert text("#head-name") == "Layer 1, head 1"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    assert text("#readout").startswith("the attends to ")
    page.keyboard.press("ArrowLeft")
    assert text("#readout").startswith("</s> is attended to by ")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator("#pairs li").first.is_visible()


def test_what_is_shown_is_what_was_computed(opened):
    given = attention(SOURCE, TARGET)
    page = opened(AttentionPicture(given).to_html())
    page.locator(".head").nth(6).click()
    page.locator("#rows .token").nth(1).hover()
    weights = given.maps["cross"].weights[1, 2, 1]
    parts = page.inner_text("#readout").removeprefix("klei attends to ").split(", ")
    best = given.source_tokens[weights.argmax()].strip("▁")
    name, shown = parts[0].split(" ")
    assert name == best
    assert abs(float(shown) - weights.max()) < 0.01
    assert page.inner_text("#columns .most") == best
    bits = given.maps["cross"].entropies[1, 2].mean()
    assert page.inner_text("#head-entropy").startswith(f"{bits:.2f} bits")


def test_right_to_left_text_runs_from_right_to_left(opened):
    page = opened(attention_page("كلب صغير يجري", "一只 小 狗"))
    first, second = (page.locator("#columns .token").nth(i).bounding_box()["x"] for i in (0, 1))
    assert first > second
    page.locator("#columns .token").first.focus()
    page.keyboard.press("ArrowLeft")
    focused = page.evaluate("document.activeElement.textContent")
    assert focused == page.locator("#columns .token").nth(1).inner_text()
