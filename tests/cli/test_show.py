import re

import pytest

from pecil.methods import METHODS


def test_results_of_whitened_pec_become_a_figure(tmp_path, ok, pecil, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("run", "whitened_pec", "digits", "--save-results", "all.jsonl", "--set", "memory=1000")
    (usual,) = ok(*small)
    assert usual["settings"] == {"teacher": "strokes", "memory": 1000}
    ok(*small, "--set", "teacher=relu")
    ok("run", "nearest_mean", "digits", "--seeds", 2, "--save-results", "all.jsonl")
    drawn = ok("figure", "memory", "--results", "all.jsonl")
    assert drawn["figure"] == "pecil-memory.png"
    assert [(p["curve"], p["held"], p["seeds"]) for p in drawn["points"]] == [
        ("whitened_pec", usual["n_parameters"], 1),  # another teacher is another curve
        ("nearest_mean", 640, 2),
    ]
    assert (tmp_path / "pecil-memory.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = pecil("figure", "memory", "--results", "all.jsonl", "-o", "m.png")
    assert (code, out) == (0, "figure  m.png\npoints  2\n")


def test_tables_are_made_from_stored_results(tmp_path, ok, pecil):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "broken.jsonl").write_text("{\n")
    code, out, err = pecil("table", "--results", folder, "-o", tmp_path / "results.md")
    assert (code, out) == (0, "")
    assert re.search(r"set aside: .*broken.jsonl, line 1: ", err)
    text = (tmp_path / "results.md").read_text()
    assert "* table1: " in text
    assert "* default_lr: " in text
    code, out, _ = pecil("table", "table1", "--results", folder)
    assert code == 0
    assert out.startswith("## table1: ")
    (folder / "broken.jsonl").unlink()
    cells = ok("table", "table1", "--results", folder)["table1"]
    assert cells[0]["paper"] == 10.09


def test_docs_are_made_from_published_results(tmp_path, ok):
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("<!-- method er: begin -->\n<!-- method er: end -->\n")
    made = ok("docs", tmp_path)
    assert made == {"results": 0, "changed": "README.md, docs/tables.md"}
    assert "Not run yet." in readme.read_text()
    assert ok("docs", tmp_path)["changed"] == "nothing"


def test_the_report_is_one_page(tmp_path, ok):
    page = tmp_path / "report.html"
    assert ok("report", "-o", page, "--results", tmp_path)["results"] == 0
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("kind", ["methods", "datasets", "tables", "figures"])
def test_lists(kind, ok, pecil):
    names = [row["name"] for row in ok("list", kind)]
    known = {"methods": "pec", "datasets": "digits", "tables": "table1", "figures": "memory"}
    assert known[kind] in names
    code, out, _ = pecil("list", kind)
    assert code == 0
    assert all(name in out for name in names)


def test_demo_prints_a_table_and_saves_a_plot(tmp_path, ok, pecil):
    plot = tmp_path / "plot.png"
    code, out, err = pecil("demo", "-o", plot, "--seeds", 1)
    assert (code, err) == (0, "")
    assert "Fine-tuning" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    accuracy = ok("demo", "-o", plot, "--seeds", 1)["accuracy"]
    assert accuracy["pec"][-1] > 0.8 > 0.2 > accuracy["finetuning"][-1]


def test_the_list_of_methods_names_what_they_are_from(pecil):
    code, out, _ = pecil("list", "methods")
    assert code == 0
    for method in METHODS.values():
        assert method.reference.split(" (")[0].split(",")[0].split()[0] in out, method.name
