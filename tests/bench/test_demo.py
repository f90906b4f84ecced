import sys

import numpy as np
import pytest
from PIL import Image

from pecil.bench import demo


def test_pec_keeps_what_the_network_forgets():
    steps = []
    measured = demo.curves([0, 1], lambda *step: steps.append(step))
    assert steps == [(k, 6) for k in range(1, 7)]
    assert list(measured) == ["whitened_pec", "pec", "finetuning"]
    assert {accuracies.shape for accuracies in measured.values()} == {(2, 10)}
    assert (measured["whitened_pec"][:, -1] > 0.9).all()
    assert (measured["pec"][:, -1] > 0.85).all()
    assert (measured["finetuning"][:, -1] < 0.2).all()


def test_the_plot_is_drawn_without_a_display(tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    path = tmp_path / "plot.png"
    random = np.random.default_rng(0)
    demo.plot({method: random.random((2, 10)) for method in ("pec", "finetuning")}, path)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert len(set(picture.convert("L").get_flattened_data())) > 50
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pecil\[plot\]"):
        demo.plot({}, tmp_path / "plot.png")
