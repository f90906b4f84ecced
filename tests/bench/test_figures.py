import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from pecil.bench import Experiment, Result, figures, planned
from pecil.bench.figures import Point
from pecil.data import DATASETS


def result(method, dataset, accuracy, held, seed=0, split=None, **changes):
    experiment = planned(method, dataset, split, seed, **changes)
    return Result(experiment, accuracy, {}, [], {}, held, "cpu", {})


MEMORY = figures.FIGURES["memory"]
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
    points = MEMORY.points(reversed(RESULTS))
    assert [(p.dataset, p.curve, p.held) for p in points] == [
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


def test_the_learning_rate_with_the_most_seeds_stands_for_a_point():
    results = [
        result("pec", "mnist", 0.90, 1, epochs=5),
        *(result("pec", "mnist", 0.93, 1, seed, epochs=5, lr=0.003) for seed in range(2)),
        result("pec", "mnist", 0.92, 1),
        *(result("pec", "mnist", 0.80, 1, seed, lr=0.03) for seed in range(2)),  # not the usual one
        result("pec", "mnist", 0.10, 1, epochs=5, student_width=7),
        result("pec", "mnist", 0.10, 1, epochs=7),  # at no place of the figures
        result("pec", "mnist", 0.10, 1, lr=0.07),
        result("pec", "cifar100", 0.10, 1),
    ]
    points = figures.FIGURES["epochs"].points(results)
    assert [(p.x, p.accuracy, p.seeds) for p in points] == [
        (1, pytest.approx(92), 1),
        (5, pytest.approx(93), 2),
    ]
    points = figures.FIGURES["learning_rate"].points(results)
    assert [(p.x, p.seeds) for p in points] == [(0.01, 1), (0.03, 2)]


def test_several_classes_a_task_are_a_dashed_curve(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, *_: drawn.append(figure))
    figure = replace(figures.FIGURES["epochs"], curves=("finetuning", "pec"))
    monkeypatch.setitem(figures.LOOKS, "finetuning", {"color": "k", "linestyle": "-"})
    results = [
        *(result("finetuning", "mnist", 0.1, 1, split=split) for split in ("10/1", "5/2", "2/5")),
        *(result("pec", "mnist", 0.9, 1, split=split) for split in ("10/1", "5/2")),
    ]
    points = figure.points(results)
    assert [(p.curve, p.split) for p in points] == [
        ("finetuning", "10/1"),
        ("finetuning", "5/2"),
        ("pec", "10/1"),
    ]
    figure.draw(points, tmp_path / "epochs.png")
    lines = [container[0] for container in drawn[0].axes[0].containers]
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-"]
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names == ["Fine-tuning", "Fine-tuning, several classes a task", "PEC"]


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_sound(name):
    figure = figures.FIGURES[name]
    assert figure.name == name
    assert figure.points([]) == []
    assert set(figure.datasets) <= set(DATASETS)
    for curve in figure.curves:
        assert figures.title_of(curve)
        assert curve in figures.LOOKS
        assert any(figure.usual(curve, dataset) for dataset in figure.datasets)


def test_a_method_with_settings_of_its_own_has_a_curve_of_its_own():
    results = [
        result("whitened_pec", "cifar10", 0.80, 11_200_000),
        result("whitened_pec", "cifar10", 0.78, 3_000_000, memory=3_000_000),
        result("whitened_pec", "cifar10", 0.82, 11_200_000, teacher="synthetic"),
        result("whitened_pec", "cifar10", 0.79, 3_000_000, teacher="synthetic", memory=3_000_000),
        result("whitened_pec", "cifar10", 0.79, 2_000_000, teacher="synthetic", memory=2_000_000),
        result("whitened_pec", "cifar100", 0.58, 11_200_000, teacher="synthetic"),
    ]
    assert [(p.curve, p.x, p.usual) for p in MEMORY.points(results)] == [
        ("whitened_synthetic", 3_000_000, False),
        ("whitened_synthetic", 11_200_000, True),
        ("whitened_pec", 3_000_000, False),
        ("whitened_pec", 11_200_000, True),
    ]
    places = MEMORY.places("whitened_synthetic", "mnist")
    assert {place["teacher"] for place in places} == {"synthetic-strokes"}


def test_an_svg_is_the_same_whenever_it_is_drawn(tmp_path):
    pictures = []
    for number in range(2):
        path = tmp_path / f"{number}.svg"
        MEMORY.draw(MEMORY.points(RESULTS), path)
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]
    assert b"CIFAR-10</text>" in pictures[0]


def test_own_data_is_passed_over():
    own = Experiment("slda", "own.npz", "2/1")
    assert MEMORY.points([Result(own, 0.5, {}, [], {}, 10, "cpu", {})]) == []


def test_a_panel_for_each_dataset_is_drawn_without_a_display(tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, *_: drawn.append(figure))
    more = result("pec", "mnist", 0.95, 200_000, budget=20_000, student_width=20)
    MEMORY.draw(MEMORY.points([*RESULTS, more]), tmp_path / "memory.png")
    panels = [axes for axes in drawn[0].axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == ["MNIST", "CIFAR-10"]
    assert {axes.get_xscale() for axes in panels} == {"log"}
    (curve, _, (bars,)), *_ = panels[1].containers
    assert curve.get_xdata().tolist() == [500, 1000, 11_000_000]
    assert [round(float(bar[1, 1] - bar[0, 1])) for bar in bars.get_segments()] == [0, 0, 2]
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert set(names) == {"Whitened PEC", "PEC", "SLDA"}

    monkeypatch.undo()
    MEMORY.draw(MEMORY.points(RESULTS), tmp_path / "memory.png")
    with Image.open(tmp_path / "memory.png") as picture:
        assert picture.format == "PNG"
    assert "matplotlib.pyplot" not in sys.modules


def test_unused_places_of_the_grid_stay_empty(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, *_: drawn.append(figure))
    names = ("mnist", "svhn", "cifar10", "cifar100")
    four = replace(MEMORY, datasets=names)
    four.draw(four.points([result("slda", name, 0.5, 10) for name in names]), tmp_path / "m.png")
    assert [axes.get_visible() for axes in drawn[0].axes] == [True] * 4 + [False] * 2


def test_small_differences_look_small(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, *_: drawn.append(figure))
    results = [result("slda", "mnist", 0.881, 1000), result("nearest_mean", "mnist", 0.88, 1010)]
    MEMORY.draw(MEMORY.points(results), tmp_path / "memory.png")
    (axes,) = drawn[0].axes
    for (low, high), least in ((axes.get_ylim(), 5), (np.log10(axes.get_xlim()), 2)):
        assert high - low == pytest.approx(least)
    assert axes.get_ylim()[0] < 88 < axes.get_ylim()[1]
    assert axes.get_xlim()[0] < 1000 < axes.get_xlim()[1]


def test_without_results_it_says_what_it_needs(tmp_path):
    with pytest.raises(ValueError, match="expected runs of .*whitened_pec, pec, randumb"):
        MEMORY.draw([], tmp_path / "memory.png")


def test_panels_without_a_curve_are_left_out_if_others_have_one(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, *_: drawn.append(figure))
    points = [
        Point("slda", dataset, x=x, held=x, accuracy=50, error=0, seeds=1, split="10/1")
        for dataset, x in (("mnist", 10), ("mnist", 100), ("cifar10", 10))
    ]
    MEMORY.draw(points, tmp_path / "m.png")
    MEMORY.draw(points[1:], tmp_path / "m.png")
    titles = [[axes.get_title(loc="left") for axes in figure.axes] for figure in drawn]
    assert titles == [["MNIST"], ["MNIST", "CIFAR-10"]]


def test_a_curve_of_which_one_place_of_several_was_run_is_left_out(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, *_: drawn.append(figure))
    points = [
        Point(curve, "mnist", x=x, held=x, accuracy=50, error=0, seeds=1, split="10/1")
        for curve, x in (("slda", 10), ("pec", 10), ("pec", 100), ("whitened_synthetic", 10))
    ]
    MEMORY.draw(points, tmp_path / "m.png")
    MEMORY.draw(points[3:], tmp_path / "m.png")
    names = [[text.get_text() for text in fig.legends[0].get_texts()] for fig in drawn]
    assert names == [["SLDA", "PEC"], ["Whitened PEC, synthetic teacher"]]


@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_legend_fits(name, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, *_: drawn.append(figure))
    figure = figures.FIGURES[name]
    points = [
        Point(curve, dataset, x=x, held=x, accuracy=50, error=0, seeds=1, split=usual.split)
        for dataset in ("mnist", "cifar10")
        for curve in figure.curves
        for usual in figure.usual(curve, dataset)
        for x in (10, 100)
    ]
    figure.draw(points, tmp_path / "m.png")
    drawn[0].canvas.draw()
    box = drawn[0].legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= drawn[0].bbox.x1
