"""The page and the Markdown: whole, alone, and safe whatever the log says."""

import json
import re
from html.parser import HTMLParser

import pytest
from synthetic_logs import Scenario, grpo_records, write_run

from k3tune.report.document import build_report
from k3tune.report.markdown import render_markdown
from k3tune.report.page import render_page

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>`a|b` $x_1$ \u202e\x1b[2J\n"
VOID = {"meta", "br", "img", "input", "link"}


class Page(HTMLParser):
    """Elements, attributes and the text of a page; fails where elements do not match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.attributes, self.ids, self.texts = [], [], [], {}
        self._open = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.attributes += attributes
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append(tag)
        self.attributes += attributes
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "<b>run & co"
    write_run(folder, grpo_records(Scenario(fault="temperature", text=EVIL, steps=100)))
    (folder / "config.yaml").write_text("base: <i>base</i>\nlora_rank: 16\n")
    return build_report([folder])


@pytest.fixture(scope="module")
def text(report):
    return render_page(report)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_page_opens_with_the_verdict(report, page):
    assert page.texts["h2"][0] == "Above floor since step 80: temperature."
    assert page.texts["title"] == ["<b>run & co: k3tune report"]


def test_the_page_needs_no_network_and_runs_no_script(text, page):
    assert page.elements.count("script") == 1
    assert not {"link", "iframe", "object", "base"} & set(page.elements)
    for name, value in page.attributes:
        assert not name.startswith("on"), name
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:image/png;base64,")), value
    shown = text.split('id="facts"')[0].replace("http://www.w3.org/", "")
    assert not re.search(r"(?:https?:)?//[a-z]", re.sub(r"data:image/png;base64,[^\"]*", "", shown))
    assert "default-src 'none'" in text


def test_text_of_the_log_is_escaped_and_what_does_not_print_is_shown(text, page):
    assert "img" not in page.elements and "b" not in page.elements and "i" not in page.elements
    assert any(shown.startswith("</script><script>alert(1)") for shown in page.texts["code"])
    assert "\u202e" not in text and "\x1b" not in text
    assert "<i>base</i>" in page.texts["code"]


def test_the_facts_are_embedded_as_they_are_printed(report, text):
    embedded = re.search(r'id="facts">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(embedded) == json.loads(json.dumps(report.facts))


def test_figures_on_the_page_are_those_of_the_facts(report, page):
    run = report.facts["runs"][0]
    figures = page.texts["dd"]
    assert f"{run['k3']['value']:.2e}".replace("e-0", "e-") in figures
    assert f"{run['reward']['now']:.3g}" in figures
    assert page.texts["dt"][:4] == ["KL (k3), now", "floor", "reward", "loss"]


def test_every_plot_is_named_drawn_explained_and_tabulated(report, page):
    count = len(report.plots)
    for element in ("figure", "figcaption", "details"):
        assert page.elements.count(element) == count
    assert page.texts["h3"] == [plot.title for plot in report.plots]
    labelled = [value for name, value in page.attributes if name == "aria-labelledby"]
    assert labelled == [f"title-{plot.id}" for plot in report.plots]
    assert set(labelled) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids)), "an id is used twice"


def test_no_stand_in_colour_is_left(text):
    assert "#0a0b" not in text and "var(--c0)" in text
    assert "font-family" not in text.split("</style>")[1]


def test_an_empty_run_has_a_page_which_loads_again_if_it_is_watched(tmp_path):
    report = build_report([write_run(tmp_path / "empty", [])])
    text = render_page(report)
    page = Page(text)
    assert page.texts["h2"] == ["Nothing is logged yet."] and "figure" not in page.elements
    assert 'http-equiv="refresh"' not in text
    assert '<meta http-equiv="refresh" content="7">' in render_page(report, refresh_s=7)
    assert render_markdown(report).startswith("# k3tune report")


def test_markdown_has_the_same_facts_and_cannot_be_broken_out_of(report):
    text = render_markdown(report)
    assert "**Above floor since step 80: temperature.**" in text
    for plot in report.plots:
        assert f"### {plot.title}" in text
    assert "<script" not in text.replace("\\<", "")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    rules = [place for place, line in enumerate(tables) if line.startswith("| --- ")]
    assert len(rules) >= len(report.plots) + 2
    for place in rules:
        assert widths[place - 1] == widths[place] == widths[place + 1]
