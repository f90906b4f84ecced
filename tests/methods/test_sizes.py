"""Parameters and operations of every method next to the paper's two tables.

Learners are built as the benchmark builds them, from the shapes of the datasets alone.
"""

from dataclasses import replace

import numpy as np
import pytest

from pecil.bench import planned, tables
from pecil.bench.experiment import _macs
from pecil.data import DATASETS
from pecil.methods import METHODS

PAPERS = ("mnist", "balanced_svhn", "cifar10", "cifar100", "miniimagenet")
SEVERAL = {"cifar100": "10/10", "miniimagenet": "20/5"}  # tasks / classes per task, else 5/2
ALIKE = [  # methods that train the network of fine-tuning
    name
    for name, method in METHODS.items()
    if method.by_task and name not in ("vae_gc", "dgr", "ensemble")
]
VAES = {"mnist": 8_854, "balanced_svhn": 1_096_821, "cifar10": 1_096_821}
VAES |= {"cifar100": 110_526, "miniimagenet": 111_137}  # of the released code, each


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch):
    """Leave the weights of convolutions as they come: only their number matters here."""
    for module in ("networks", "vae_gc", "ensemble"):
        monkeypatch.setattr(f"pecil.methods.{module}.draw", lambda network, generator: None)


def learner_of(experiment):
    info, method = DATASETS[experiment.dataset], METHODS[experiment.method]
    settings = dict(experiment.settings)
    if not method.independent and not method.by_task:
        del settings["batch_size"]
    return method.learner(info.n_classes, info.shape, device="cpu", **settings)


def samples(dataset):
    return np.ones((1, *DATASETS[dataset].shape), np.uint8)


def straight(f, n):
    """Return f(n) of a function that grows by the same amount from 1 to 2, to 3, ..."""
    return f(1) + (n - 1) * (f(2) - f(1))


def size(experiment, measure):
    """Return the parameters or the operations of a learner that has seen all classes."""
    wide = experiment.settings.get("teacher_width", 0)
    if wide > 2:  # slow to draw

        def narrow(width):
            settings = {**experiment.settings, "teacher_width": width}
            return size(replace(experiment, settings=settings), measure)

        return straight(narrow, wide)

    def after(n_classes):
        learner, one = learner_of(experiment), samples(experiment.dataset)
        for label in range(n_classes):
            learner.begin_task({label: 1})
            learner.learn(one, np.array([label]))
            learner.end_task()
        return learner.n_parameters if measure == "parameters" else _macs(learner, one)

    independent = METHODS[experiment.method].independent
    return straight(after, DATASETS[experiment.dataset].n_classes) if independent else after(0)


def cells(name, *but):
    found = [cell for cell in tables.cells(name, []) if cell.name not in but]
    return [pytest.param(cell, id=f"{cell.name}-{cell.dataset}") for cell in found]


def cell(name, dataset):
    (found,) = (c for c in tables.cells("parameters", []) if (c.name, c.dataset) == (name, dataset))
    return found


@pytest.mark.parametrize("cell", [*cells("parameters", "slda", "vae_gc"), *cells("macs")])
def test_the_papers_counts(cell):
    ours = replace(cell, ours=(size(cell.experiment, cell.measure),))
    assert ours.agrees, f"{ours.our_text}, the paper {ours.paper_text}"


@pytest.mark.parametrize("dataset", PAPERS)
def test_slda_holds_one_half_of_a_symmetric_matrix_of_which_the_paper_counts_both(dataset):
    papers = cell("slda", dataset)
    features = learner_of(papers.experiment).summary.dim
    held = size(papers.experiment, "parameters")
    assert held == DATASETS[dataset].n_classes * features + features * (features + 1) // 2
    assert replace(papers, ours=(held + features * (features - 1) // 2,)).agrees


@pytest.mark.parametrize("dataset", PAPERS)
def test_vae_gc_has_the_sizes_of_the_released_code(dataset):
    held = learner_of(planned("vae_gc", dataset)).n_parameters
    assert held == DATASETS[dataset].n_classes * VAES[dataset]
    assert replace(cell("vae_gc", dataset), ours=(held,)).agrees


@pytest.mark.parametrize("dataset", PAPERS)
@pytest.mark.parametrize("name", ALIKE)
def test_discriminative_methods_train_the_network_of_fine_tuning(name, dataset):
    expected = {10: 11_173_962, 100: 11_220_132}[DATASETS[dataset].n_classes]
    learner = learner_of(planned(name, dataset))
    assert learner.n_parameters == (89_610 if dataset == "mnist" else expected)


@pytest.mark.parametrize("cell", cells("small_budget"))
def test_a_tenth_of_the_parameters(cell):
    assert size(cell.experiment, "parameters") == pytest.approx(1.1e6, rel=0.05 / 1.1)


@pytest.mark.parametrize("dataset", PAPERS)
@pytest.mark.parametrize("network", ["full", "small", "pec"])
def test_an_ensemble_has_as_many_parameters_as_pec_or_a_whole_network_a_task(network, dataset):
    split = SEVERAL.get(dataset, "5/2")
    tasks, classes = map(int, split.split("/"))
    experiment = planned("ensemble", dataset, split, network=network)

    def after(n_tasks):
        learner = learner_of(experiment)
        for task in range(n_tasks):
            learner.begin_task(dict.fromkeys(range(task * classes, (task + 1) * classes), 1))
            learner.end_task()
        return learner.n_parameters

    alone = learner_of(planned("finetuning", dataset))
    if network == "full":
        head = (tasks - 1) * classes * (alone.network.head.in_features + 1)  # of other tasks
        assert straight(after, tasks) == tasks * (alone.n_parameters - head)
    else:  # widths are whole numbers
        assert straight(after, tasks) == pytest.approx(alone.n_parameters, rel=0.05)
