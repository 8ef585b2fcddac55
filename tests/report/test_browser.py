"""The page as a browser lays it out, on a phone and on a desk, dark and light."""

import pytest
from synthetic_logs import Scenario, grpo_records, sft_records, write_run
from webdriver import BROWSER, DRIVER, browser

from k3tune.report.document import build_report
from k3tune.report.page import render_page

pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs chromium and chromedriver (Debian: chromium-driver)"
)

LOOKS = [(390, 844, "light"), (390, 844, "dark"), (1280, 900, "light"), (1280, 900, "dark")]

# Texts of one figure that lie on each other or stick out of it, and figures with nothing drawn.
FAULTS = """
const faults = [];
const name = (t) => t.closest("figure").id + " " + JSON.stringify(t.textContent);
for (const figure of document.querySelectorAll("figure")) {
  const frame = figure.getBoundingClientRect();
  const texts = [...figure.querySelectorAll("svg[role=img] text")].map(
    (text) => [text, text.getBoundingClientRect()]);
  texts.forEach(([text, box], place) => {
    if (box.left < frame.left || box.right > frame.right) faults.push("clipped: " + name(text));
    for (const [other, o] of texts.slice(place + 1)) {
      const wide = Math.min(box.right, o.right) - Math.max(box.left, o.left);
      const high = Math.min(box.bottom, o.bottom) - Math.max(box.top, o.top);
      if (wide > 1 && high > 2) faults.push("overlap: " + name(text) + name(other));
    }
  });
  const plot = figure.id.replace("plot-", "");
  const data = [...figure.querySelectorAll("svg[role=img] [id]")].filter((element) => {
    const box = element.getBoundingClientRect();
    return new RegExp("^" + plot + "-[0-9]+$").test(element.id) && box.width + box.height > 2;
  });
  if (!data.length || texts.length < 3) faults.push("empty: " + figure.id);
}
for (const element of document.querySelectorAll("p, dd, h2, h3, li, figcaption, small"))
  if (element.scrollWidth > element.clientWidth + 1)
    faults.push("cut: " + element.className + element.textContent.slice(0, 40));
const whole = document.documentElement;
if (whole.scrollWidth > whole.clientWidth) faults.push("the page is too wide");
return faults;
"""

# Least contrast (WCAG) of the page's texts, and of lines on their cards.
CONTRAST = """
const light = (colour) => {
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => {
    const c = part / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
const card = light(getComputedStyle(document.querySelector("figure")).backgroundColor);
const of = (selector, property) => Math.min(...[...document.querySelectorAll(selector)].map(
  (element) => ratio(light(getComputedStyle(element)[property]), card)));
return {
  text: of("figure h3, figcaption, figure p, dd, dt, .why, .note, .sign", "color"),
  ticks: of("figure svg[role=img] text", "fill"),
  lines: of("figure .keys path", "stroke"),
};
"""


@pytest.fixture(scope="module")
def window():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = write_run(
        tmp_path_factory.mktemp("runs") / "a-run-with-a-rather-long-name-of-one-word",
        grpo_records(Scenario(fault="stale adapter", fault_step=80, layers=12)),
    )
    (folder / "report.html").write_text(render_page(build_report([folder])))
    return folder / "report.html"


def test_the_first_screen_of_a_phone_has_the_verdict(window, page):
    window.look(390, 844, "light")
    window.open(page)
    script = "const v = document.getElementById('verdict-0'); return [v.innerText, "
    text, bottom = window.run(script + "v.getBoundingClientRect().bottom];")
    assert text.endswith("Above floor since step 80: stale adapter.") and bottom < 400
    places = "return [...document.querySelectorAll('dt')].map("
    places = window.run(places + "(t) => [t.innerText, t.getBoundingClientRect().bottom])")
    shown = [name for name, bottom in places if bottom < 844]
    assert {"KL (k3), now", "floor", "reward", "loss", "adapter version"} <= set(shown)


@pytest.mark.parametrize("look", LOOKS, ids=str)
def test_nothing_overlaps_is_clipped_or_empty(window, page, look):
    window.look(*look)
    window.open(page)
    assert window.run(FAULTS) == []
    contrast = window.run(CONTRAST)
    assert contrast["text"] >= 4.5 and contrast["ticks"] >= 4.5 and contrast["lines"] >= 3


def test_several_runs_of_different_kinds_stand_side_by_side(window, tmp_path):
    folders = [
        write_run(tmp_path / "clean", grpo_records(Scenario(steps=40))),
        write_run(tmp_path / "sft", sft_records(steps=40)),
    ]
    file = tmp_path / "report.html"
    file.write_text(render_page(build_report(folders)))
    for width in (390, 1280):
        window.look(width, 900, "light")
        window.open(file)
        assert window.run(FAULTS) == []
        tops = "return [...document.querySelectorAll('.run')].map("
        tops = window.run(tops + "(r) => r.getBoundingClientRect().top)")
        assert (tops[0] == tops[1]) == (width > 600)


def test_faults_of_a_layout_would_be_seen(window, page):
    window.look(390, 844, "light")
    window.open(page)
    found = window.run(
        "const text = document.querySelector('#plot-kl svg[role=img] text');"
        "text.parentNode.append(text.cloneNode(true));"
        "document.querySelector('#plot-tests svg[role=img] text').setAttribute('x', '-60');"
        "document.querySelectorAll('#plot-ess svg path').forEach((path) => path.remove());"
        "document.querySelector('header').style.width = '500px';" + FAULTS
    )
    assert [fault.split(":")[0] for fault in found if "plot-kl" in fault] == ["overlap"]
    assert any(fault.startswith("clipped: plot-tests") for fault in found)
    assert "empty: plot-ess" in found and "the page is too wide" in found
