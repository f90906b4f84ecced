import base64
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from pecil.bench import Result, planned, report, tables

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&"
VOID = {"meta", "img"}


def result(accuracy, dataset="mnist", seed=0, method="pec", **changes):
    experiment = planned(method, dataset, None, seed, **changes)
    seconds = {"load": 0.5, "fit": 12.25 + seed, "test": 1.0}
    versions = {"torch": "2.9", "numpy": "2.1"}
    return Result(experiment, accuracy, {}, [], seconds, 89_590, "cpu: 1 thread", versions)


RESULTS = [
    result(0.92, seed=1),
    result(0.93, seed=2),
    result(0.50, "cifar10"),
    result(0.98, method="whitened_pec"),
    result(0.10, lr=0.03),
]


class Reader(HTMLParser):
    """Gathers tags and texts; tags must be closed in the order in which they were opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def values(self, attribute):
        return [attrs[attribute] for _, attrs in self.tags if attribute in attrs]


@pytest.fixture(scope="module")
def page():
    return report.page(RESULTS)


def cell(page, table, row, number=1):
    """Return the HTML of a cell."""
    (part,) = re.findall(rf'<details class="part" id="{table}".*?</details>', page, re.DOTALL)
    (line,) = re.findall(rf"<tr><th scope=\"row\">{re.escape(row)}</th>(.*)</tr>", part)
    return re.findall(r"<td.*?</td>", line)[number - 1]


def test_ours_stand_next_to_the_papers_with_the_verdict_in_words(page):
    agrees = cell(page, "table1", "PEC")
    assert 'class="yes"' in agrees
    for text in ("92.50 ± 0.50", "(2)", "✓ agrees +0.19", "paper 92.31 ± 0.13"):
        assert text in agrees
    differs = cell(page, "table1", "PEC", 3)
    assert 'class="no"' in differs
    assert "✗ differs -8.94" in differs
    assert "not run" in cell(page, "table1", "ER (500)")
    assert "84.42 ± 0.26" in cell(page, "table1", "ER (500)")
    assert "ours alone" in cell(page, "whitened", "Whitened PEC")
    assert "not run" not in cell(page, "whitened", "joint training, 1 epoch")
    assert "5 runs; of 4 numbers that can be compared,\n<strong>2 agree</strong>" in page


def test_every_table_and_figure_is_there_and_every_link_leads_somewhere(page):
    reader = Reader(page)
    ids = reader.values("id")
    assert len(set(ids)) == len(ids)
    assert set(tables.definitions()) <= set(ids)
    links = reader.values("href")
    assert links
    assert {link.removeprefix("#") for link in links} <= set(ids)
    for figure in report.FIGURES.values():
        assert figure.title.replace("'", "&#x27;") in page


def test_a_number_leads_to_its_runs(page):
    (anchor,) = re.findall(r'href="#runs-(\w+)"', cell(page, "table1", "PEC"))
    start = page.index(f'<div id="runs-{anchor}">')
    runs = page[start : page.index("</details>", start)]
    assert "teacher_width = 5000" in runs
    assert "torch 2.9, numpy 2.1" in runs
    assert "cpu: 1 thread" in runs
    lines = [re.findall(r"<td>(.*?)</td>", line) for line in runs.splitlines() if "<td>" in line]
    keys = [r.experiment.key for r in RESULTS[:2]]
    assert lines == [
        ["1", "92.00 %", "0.50", "13.25", "1.00", keys[0]],
        ["2", "93.00 %", "0.50", "14.25", "1.00", keys[1]],
    ]
    assert "1 more are in no table" in page


def test_what_differs_between_runs_is_told_of_each():
    page = report.page([RESULTS[0], replace(RESULTS[1], device="cuda: H200", macs=12_345)])
    assert re.search(r"<tr><td>1</td>.*<td>cpu: 1 thread</td>", page)
    assert re.search(r"<tr><td>2</td>.*<td>cuda: H200</td>.*<td>12,345</td>", page)


def test_tables_without_runs_of_their_own_are_folded(page):
    unfolded = re.findall(r'<details class="part" id="([\w-]+)" open>', page)
    assert [name for name in unfolded if name in tables.definitions()] == [
        "table1",
        "parameters",
        "whitened",
    ]


def test_sorting_takes_our_number_or_else_the_papers(page):
    assert 'data-value="92.5"' in cell(page, "table1", "PEC")
    assert 'data-value="84.42"' in cell(page, "table1", "ER (500)")


def test_hostile_texts_stay_texts(monkeypatch):
    row = {"title": HOSTILE, "method": "pec", "settings": {"init": HOSTILE}, "name": HOSTILE}
    table = {"title": HOSTILE, "note": HOSTILE, "datasets": ["mnist"], "rows": [row]}
    monkeypatch.setattr(report, "definitions", lambda: {HOSTILE: table})
    monkeypatch.setattr(tables, "definitions", lambda: {HOSTILE: table})
    hostile = replace(
        result(0.9, init=HOSTILE),
        device=HOSTILE,
        versions={HOSTILE: HOSTILE},
        data_note=HOSTILE,
        seconds={HOSTILE: 1.0},
    )
    page = report.page([hostile])
    reader = Reader(page)
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert not [attrs for _, attrs in reader.tags if "onerror" in attrs]
    assert [attrs["src"][:5] for tag, attrs in reader.tags if tag == "img"] in ([], ["data:"])
    shown = "".join(reader.texts)
    for text in (f"init = {HOSTILE}", f"seconds to {HOSTILE}", f"{HOSTILE} {HOSTILE}"):
        assert text in shown


def test_it_needs_nothing_but_itself(page):
    reader = Reader(page)
    assert [value[:11] for value in reader.values("src")] == ["data:image/"] * len(
        reader.values("src")
    )
    assert "http:" not in report.STYLE + report.SCRIPT
    assert "https:" not in report.STYLE + report.SCRIPT
    (policy,) = [v for v in reader.values("content") if "default-src" in v]
    assert policy.startswith("default-src 'none'; img-src data:; ")
    drawn = [base64.b64decode(value.split(",")[1]) for value in reader.values("src")]
    assert drawn
    assert all(b"<svg" in picture for picture in drawn)


def test_it_does_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = report.page(RESULTS)
    assert "drawing needs matplotlib: pip install &quot;pecil[plot]&quot;" in page
    assert "<img" not in page
    assert "92.50 ± 0.50" in page


def test_it_is_written_whole_and_the_same_every_time(tmp_path, page):
    report.write(iter(RESULTS), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page
    with pytest.raises(FileNotFoundError, match="no folder"):
        report.write([], tmp_path / "no" / "report.html")
