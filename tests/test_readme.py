"""What the README shows, runs."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(code, names)
    printed = capsys.readouterr().out.splitlines()
    assert float(printed[0]) > 0.95  # two classes
    assert printed[1].startswith("[0 1 2]")
    assert float(printed[1].split()[-1]) > 0.9
    assert "none of these" in printed[2]
    assert names["model"].classes_.tolist() == [0, 1, 2, 3]
    assert (tmp_path / "digits.pecil").is_file()


def test_what_it_links_to_exists():
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    assert links
    for link in links:
        assert (Path(__file__).parents[1] / link).exists(), link
