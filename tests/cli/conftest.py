"""Call the command line in this process; data and a model for it."""

import csv
import json

import numpy as np
import pytest
from arguments import SMALL, samples

from pecil.cli import main


@pytest.fixture
def pecil(capsys, monkeypatch, tmp_path_factory):
    """Call the command line in this process: arguments in, (exit code, output, errors) out."""
    monkeypatch.setenv("PECIL_STORE", str(tmp_path_factory.mktemp("store") / "store.sqlite"))

    def call(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def ok(pecil):
    """Call a command that must succeed with --json; return what it printed."""

    def call(*arguments):
        code, out, err = pecil(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


@pytest.fixture
def data(tmp_path):
    """Write samples of the given labels as an .npz or a .csv and return its path."""

    def write(labels, kind="npz", test=False, **options):
        path = tmp_path / f"{labels}-{len(list(tmp_path.iterdir()))}.{kind}"
        x, y = samples(list(labels), **options)
        if kind == "csv":
            with path.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow([*(f"x{i}" for i in range(8)), "kind"])
                writer.writerows([*map(str, row), label] for row, label in zip(x, y, strict=True))
        elif test:
            test_x, test_y = samples(list(labels), seed=1)
            np.savez(path, train_x=x, train_y=y, test_x=test_x, test_y=test_y)
        else:
            np.savez(path, x=x, y=y)
        return path

    return write


@pytest.fixture
def model(tmp_path, data, ok):
    path = tmp_path / "model.pecil"
    ok("fit", data("ab"), "-o", path, *SMALL)
    return path
