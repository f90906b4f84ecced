import sys

import pytest
from PIL import Image

from pecil.bench import Experiment, Result, figures, planned


def result(method, dataset, accuracy, held, seed=0, split=None, **changes):
    experiment = planned(method, dataset, split, seed, **changes)
    return Result(experiment, accuracy, {}, [], {}, held, "cpu", {})


RESULTS = [
    result("whitened_pec", "cifar10", 0.70, 1000, memory=1000),
    result("whitened_pec", "cifar10", 0.80, 11_000_000, seed=0),
    result("whitened_pec", "cifar10", 0.82, 11_000_000, seed=1),
    result("whitened_pec", "cifar10", 0.60, 500, dim=20),
    result("slda", "cifar10", 0.40, 5000),
    result("pec", "mnist", 0.92, 89_590),
    result("whitened_pec", "cifar10", 0.10, 7, ridge=3.0),
    result("whitened_pec", "cifar10", 0.10, 7, split="5/2"),
    result("slda", "cifar10", 0.10, 7, shrinkage=0.5),
    result("finetuning", "digits", 0.10, 7),
]


def test_points_are_runs_with_the_usual_settings_but_for_the_size():
    points = figures.memory_points(reversed(RESULTS))
    assert [(p.dataset, p.method, p.held) for p in points] == [
        ("mnist", "pec", 89_590),
        ("cifar10", "whitened_pec", 500),
        ("cifar10", "whitened_pec", 1000),
        ("cifar10", "whitened_pec", 11_000_000),
        ("cifar10", "slda", 5000),
    ]
    largest = points[3]
    assert (largest.accuracy, largest.error, largest.seeds) == (
        pytest.approx(81),
        pytest.approx(1),
        2,
    )


def test_own_data_is_passed_over():
    own = Experiment("slda", "own.npz", "2/1")
    assert figures.memory_points([Result(own, 0.5, {}, [], {}, 10, "cpu", {})]) == []


def test_a_panel_for_each_dataset_is_drawn_without_a_display(tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    figures.memory(figures.memory_points(RESULTS), tmp_path / "memory.png")
    panels = [axes for axes in drawn[0].axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == ["MNIST", "CIFAR-10"]
    assert {axes.get_xscale() for axes in panels} == {"log"}
    (curve, _, (bars,)), *_ = panels[1].containers
    assert curve.get_xdata().tolist() == [500, 1000, 11_000_000]
    assert [round(float(bar[1, 1] - bar[0, 1])) for bar in bars.get_segments()] == [0, 0, 2]
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert set(names) == {"Whitened PEC", "PEC", "SLDA"}

    monkeypatch.undo()
    figures.memory(figures.memory_points(RESULTS), tmp_path / "memory.png")
    with Image.open(tmp_path / "memory.png") as picture:
        assert picture.format == "PNG"
    assert "matplotlib.pyplot" not in sys.modules


def test_unused_places_of_the_grid_stay_empty(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    names = ("mnist", "svhn", "cifar10", "cifar100")
    figures.memory(
        figures.memory_points([result("slda", name, 0.5, 10) for name in names]), tmp_path / "m.png"
    )
    assert [axes.get_visible() for axes in drawn[0].axes] == [True] * 4 + [False] * 2


def test_without_results_it_says_what_it_needs(tmp_path):
    with pytest.raises(ValueError, match="expected runs of whitened_pec, pec, randumb"):
        figures.memory([], tmp_path / "memory.png")
