"""What docs/extending.md shows, runs."""

import importlib
import re
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from pecil.data import DATASETS
from pecil.methods import METHODS

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """Return a function that runs a program of the page; its answer is what was printed."""

    def run(name):
        (code,) = re.findall(rf"`{name}.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PECIL_DATA", str(tmp_path))
        for names in (sys.modules, METHODS, DATASETS):  # put back in the end
            monkeypatch.setitem(names, name, None)
            del names[name]
        importlib.import_module(name).main()
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    return run


def test_a_method(printed):
    (ridge, accuracy), (smaller, other) = printed("naive_bayes")
    assert (ridge, smaller) == ("0.1", "0.01")
    assert float(accuracy) > 0.8
    assert float(other) > 0.8
    assert accuracy != other


def test_a_dataset(printed):
    (first, accuracy), (second, other) = printed("wine")
    assert (first, second) == ("nearest_mean", "slda")
    assert float(accuracy) > 0.9
    assert float(other) > 0.9


@pytest.mark.parametrize("section", ["joint", "joint 50ep"])
def test_the_settings_that_it_quotes(section):
    (quoted,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    file = resources.files("pecil.bench") / "settings" / "mnist.toml"
    real = tomllib.loads(file.read_text(encoding="utf-8"))
    assert tomllib.loads(quoted)[section].items() <= real[section].items()
