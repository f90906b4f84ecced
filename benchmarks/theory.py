"""The paper's propositions at work: PEC, GP-PEC(B) and the Gaussian-process rule.

    python benchmarks/theory.py samples       scores as a class gets more samples
    python benchmarks/theory.py agreement     who agrees with whom, over draws, students, widths
    python benchmarks/theory.py outputs       PEC over the number of its outputs
    python benchmarks/theory.py --table       docs/theory.md and its figures, from the stored runs

A seed sets everything: the samples of a run, test samples included, teachers, students, draws.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.gaussian_process.kernels import DotProduct

from common import ROOT, Array, Row, describe, keep, kept, put
from pecil import PEC
from pecil.bench.figures import blank, save
from pecil.bench.tables import standard_error, with_error
from pecil.data import load
from pecil.pec.gp import (
    GPClassifier,
    KernelPosterior,
    NetworkKernel,
    expected_error,
    imitation_error,
    prior_draws,
    random_features,
)
from pecil.pec.networks import Architecture
from pecil.pec.teacher import Teacher

RESULTS = ROOT / "results" / "validation" / "theory.jsonl"
DOCS = ROOT / "docs"
COUNTS = (3, 10, 30, 100, 300, 1000, 3000)  # samples of a class
WIDTHS = (10, 30, 100, 300, 1000, 3000, 10_000)  # of the teacher
DRAWS = (1, 3, 10, 30, 99, 300, 1000)
OUTPUTS, MANY = 99, 999  # of PEC's teacher and students on MNIST; of another teacher
TEACHER = 5000  # its width there
PER_CLASS, TESTED = 300, 2000  # samples behind agreements
NOISELESS = 1e-8  # the paper's propositions have no noise: so little that factors exist
NOISE = 1e-4
WRONG = " of the best wrong class"
STUDENT: dict[str, Any] = {"lr": 0.003, "output_dim": OUTPUTS, "device": "cpu"}
THOROUGH: dict[str, Any] = {"student_width": 100, "equal_budgets": 3000}
STUDENTS = {"pec": THOROUGH, "pec_small": {"student_width": 10, "equal_budgets": 3000}}


# --- samples --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Some samples of each class, class after class, and some to be classified."""

    x: Array
    y: Array
    test_x: Array
    test_y: Array

    def of(self, label: int, start: int = 0, stop: int | None = None) -> Array:
        """Return samples of one class."""
        return self.x[self.y == label][start:stop]


def digits(per_class: int, tested: int, seed: int) -> Samples:
    """Return some of MNIST."""
    data: Any = load("mnist")
    rng = np.random.default_rng(seed)
    own = [rng.permutation(np.flatnonzero(data.train_y == c))[:per_class] for c in range(10)]
    at, test = np.concatenate(own), rng.permutation(len(data.test_x))[:tested]
    x, test_x = (images.reshape(len(images), -1) / 255 for images in (data.train_x, data.test_x))
    return Samples(x[at], data.train_y[at], test_x[test], data.test_y[test])


def cubes(per_class: int, tested: int, seed: int) -> Samples:
    """Return points of two cubes in space, [−1, 0]³ and [0, 1]³, that touch in a corner."""
    rng = np.random.default_rng(seed)
    y, test_y = np.repeat([0, 1], per_class), np.repeat([0, 1], tested // 2)
    x, test_x = (rng.uniform(-1, 0, (len(labels), 3)) + labels[:, None] for labels in (y, test_y))
    return Samples(x, y, test_x, test_y)


def versions(start: float) -> Row:
    """Return what a row says of where it was made."""
    made_by = {"numpy": np.__version__, "scikit-learn": sklearn.__version__}
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "machine": describe("cpu"),
        **made_by,
    }


# --- scores as a class gets more samples ----------------------------------------------------


PANELS: dict[str, tuple[str, Callable[[int, int, int], Samples], str]] = {
    "cubes, gelu": ("two cubes, GELU network", cubes, "gelu"),
    "cubes, relu": ("two cubes, ReLU network", cubes, "relu"),
    "mnist, gelu": ("MNIST, GELU network", digits, "gelu"),
}


def over_samples(seed: int) -> Iterator[Row]:
    """Measure scores of the right class and of the best wrong one, in units of the prior's."""
    for name, (_, draw, activation) in PANELS.items():
        data = draw(max(COUNTS), 400, seed)
        kernel = NetworkKernel(activation)
        prior = kernel.diag(data.test_x).mean()
        rule = GPClassifier(kernel=kernel, noise=NOISELESS)
        functions = {c: one_function(kernel, data, c, seed) for c in np.unique(data.y)}
        settings = STUDENT | THOROUGH | {"teacher_width": TEACHER, "activation": activation}
        for seen, n in pairwise((0, *COUNTS)):
            start = time.perf_counter()
            rule.partial_fit(*first(data, seen, n))
            row: Row = {"experiment": "samples", "panel": name, "samples": n, "seed": seed}
            row |= {"pec_settings": settings, "noise": NOISELESS}
            row |= of_the_right("variance", rule.variances(data.test_x) / prior, data.test_y)
            row |= of_pec(PEC(**settings, random_state=seed), data, n)
            row["gp_pec_1"] = one_function_error(rule, functions, data, n) / prior
            yield row | versions(start)


def of_pec(model: PEC, data: Samples, n: int) -> Row:
    """Return errors of PEC after n samples of each class: on new samples, and in training."""
    model.fit(*first(data, 0, n))
    answers = model._teachers[0](torch.from_numpy(data.test_x).float())
    prior = float(answers.square().mean())
    x, y = first(data, 0, min(n, 40))
    training = of_the_right("pec_training", model.errors(x) / prior, y)
    return of_the_right("pec", model.errors(data.test_x) / prior, data.test_y) | training


def first(data: Samples, start: int, stop: int) -> tuple[Array, Array]:
    """Return samples from one place of each class to another, and their labels."""
    labels = np.unique(data.y)
    x = np.concatenate([data.of(c, start, stop) for c in labels])
    return x, np.repeat(labels, stop - start)


def of_the_right(name: str, scores: Array, y: Array) -> Row:
    """Return the mean score of the right class, and of the best of the others."""
    right = scores[np.arange(len(y)), y]
    others = scores.copy()
    others[np.arange(len(y)), y] = np.inf
    return {name: float(right.mean()), f"{name}{WRONG}": float(others.min(1).mean())}


def one_function(kernel: NetworkKernel, data: Samples, label: int, seed: int) -> tuple[Any, Any]:
    """Return one drawn function at a class's samples and at its test samples."""
    own, test = data.of(label), data.test_x[data.test_y == label]
    drawn = prior_draws(kernel, np.vstack([own, test]), 1, np.random.RandomState([seed, label]))
    return drawn[: len(own)], drawn[len(own) :]


def one_function_error(rule: GPClassifier, functions: Any, data: Samples, n: int) -> float:
    """Return s_1 of the right class, averaged over test samples; students are posterior means."""
    errors = [
        imitation_error(rule.posteriors_[c], h[:n], data.test_x[data.test_y == c], values)
        for c, (h, values) in functions.items()
    ]
    return float(np.concatenate(errors).mean())


# --- who agrees with whom -------------------------------------------------------------------


def agreements(seed: int) -> Iterator[Row]:
    """Classify MNIST by every rule: over draws, over students, over widths of the teacher."""
    data = digits(PER_CLASS, TESTED, seed)
    rule = GPClassifier(noise=NOISE).fit(data.x, data.y)
    chosen = rule.predict(data.test_x)
    base: Row = {"seed": seed, "per_class": PER_CLASS, "tested": TESTED, "noise": NOISE}
    yield from over_draws(data, rule, chosen, base)
    yield from over_students(data, rule, base)
    for width in WIDTHS:
        yield over_widths(data, rule, chosen, width, base)


def judged(predictions: dict[str, Array], y: Array) -> Row:
    """Return accuracies, and how often each two agree, in percent."""
    names = list(predictions)
    pairs = [(a, b) for k, a in enumerate(names) for b in names[k + 1 :]]
    return {
        **{f"{a} right": percent(predictions[a] == y) for a in names},
        **{f"{a} = {b}": percent(predictions[a] == predictions[b]) for a, b in pairs},
    }


def percent(right: Array) -> float:
    """Return how often something holds."""
    return 100 * float(np.mean(right))


def over_draws(data: Samples, rule: GPClassifier, chosen: Array, base: Row) -> Iterator[Row]:
    """GP-PEC(B) for more and more functions, against the rule that is its limit."""
    start = time.perf_counter()
    rng = np.random.RandomState(base["seed"])
    h = prior_draws(NetworkKernel(), np.vstack([data.x, data.test_x]), max(DRAWS), rng)
    seen, values = h[: len(data.x)], h[len(data.x) :]
    seen = seen + np.sqrt(NOISE) * rng.normal(size=seen.shape)
    squares = np.stack(
        [
            np.square(posterior.weights(data.test_x).T @ seen[data.y == c] - values)
            for c, posterior in rule.posteriors_.items()
        ]
    )  # (classes, tested, draws)
    for draws in DRAWS:
        scores = squares[..., :draws].mean(-1)
        row = {"experiment": "draws", "draws": draws, **base}
        yield (
            row | judged({"gp": chosen, "gp_pec": scores.argmin(0)}, data.test_y) | versions(start)
        )


def over_students(data: Samples, rule: GPClassifier, base: Row) -> Iterator[Row]:
    """s_∞ of students that are linear in what they see, in percent of the prior's variance."""
    kernel, x = NetworkKernel(), data.test_x
    makers: dict[str, Callable[[KernelPosterior], Array]] = {
        "posterior mean": lambda p: p.weights(x),
        "posterior mean for a noise of 0.1": lambda p: (
            KernelPosterior.prior(kernel, 0.1, x.shape[1]).given(p.inputs).weights(x)
        ),
        "nearest sample": lambda p: np.eye(PER_CLASS)[nearest(p.inputs, x)].T,
        "mean of all samples": lambda p: np.full((PER_CLASS, len(x)), 1 / PER_CLASS),
    }
    variances = rule.variances(x)
    unit = 100 / kernel.diag(x).mean()
    for student, weights in makers.items():
        start = time.perf_counter()
        errors = [
            expected_error(kernel, p.inputs, x, weights(p), NOISE)
            for p in rule.posteriors_.values()
        ]
        scores = np.stack(errors, axis=1)
        row = {"experiment": "students", "student": student, **base}
        row |= of_the_right("score", unit * scores, data.test_y)
        row |= of_the_right("variance", unit * variances, data.test_y)
        row["least excess"] = unit * float((scores - variances).min())
        predictions = {"gp": variances.argmin(1), "student": scores.argmin(1)}
        yield row | judged(predictions, data.test_y) | versions(start)


def nearest(inputs: Array, x: Array) -> Array:
    """Return the nearest input of each sample."""
    return (np.square(inputs).sum(1) - 2 * x @ inputs.T).argmin(1)


def over_widths(data: Samples, rule: GPClassifier, chosen: Array, width: int, base: Row) -> Row:
    """Put a network of some width in place of the process, and trained students in place of means.

    ``features`` is the rule with the kernel of that many random hidden units; ``gp_pec_99`` has
    PEC's own teacher, with 99 outputs, and posterior means as students, ``gp_pec_999`` a teacher
    with 999; ``pec`` trains a wide student, ``pec_small`` the paper's.
    """
    start, seed = time.perf_counter(), base["seed"]
    hidden = random_features(
        NetworkKernel(), width, data.x.shape[1], np.random.RandomState([seed, width])
    )
    finite = GPClassifier(kernel=DotProduct(0), noise=NOISE).fit(hidden(data.x), data.y)
    predictions = {"gp": chosen, "features": finite.predict(hidden(data.test_x))}
    for name, student in STUDENTS.items():
        model = PEC(**STUDENT, **student, teacher_width=width, random_state=seed)
        predictions[name] = model.fit(data.x, data.y).predict(data.test_x)
    many = Teacher(
        Architecture("mlp", (data.x.shape[1],), width, MANY), "kaiming", seed, model.device_
    )
    for name, teacher in (("gp_pec_99", model._teachers[0]), ("gp_pec_999", many)):
        h, values = (
            teacher(torch.from_numpy(x).float()).double().numpy() for x in (data.x, data.test_x)
        )
        scores = [
            imitation_error(posterior, h[data.y == c], data.test_x, values)
            for c, posterior in rule.posteriors_.items()
        ]
        predictions[name] = np.argmin(scores, axis=0)
    row = {"experiment": "width", "width": width, **base}
    row |= {"pec_settings": {name: {**STUDENT, **own} for name, own in STUDENTS.items()}}
    return row | judged(predictions, data.test_y) | versions(start)


def over_outputs(seed: int) -> Iterator[Row]:
    """PEC with more and more outputs, each about a function drawn from the process."""
    data = digits(PER_CLASS, TESTED, seed)
    chosen = GPClassifier(noise=NOISE).fit(data.x, data.y).predict(data.test_x)
    for outputs in DRAWS:
        start = time.perf_counter()
        settings = STUDENT | THOROUGH | {"teacher_width": TEACHER, "output_dim": outputs}
        model = PEC(**settings, random_state=seed).fit(data.x, data.y)
        row = {"experiment": "outputs", "draws": outputs, "seed": seed, "noise": NOISE}
        row |= {"per_class": PER_CLASS, "tested": TESTED, "pec_settings": settings}
        predictions = {"gp": chosen, "pec": model.predict(data.test_x)}
        yield row | judged(predictions, data.test_y) | versions(start)


# --- page and figures -----------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """How a curve is named and drawn: told apart without colours, too."""

    label: str
    color: str
    line: str
    marker: str
    hollow: bool = False


SCORES = {
    "variance": Look("posterior variance σ²", "#0b4f8a", "-", "o"),
    "gp_pec_1": Look("s₁ of GP-PEC(1)", "#0b6e4f", "--", "s"),
    "pec": Look("error of PEC", "#c2571a", "-.", "^"),
    "pec_training": Look("training error of PEC (ε)", "#c2571a", "--", "x"),
    f"variance{WRONG}": Look("σ², best wrong class", "#0b4f8a", ":", "o", hollow=True),
    f"pec{WRONG}": Look("error of PEC, best wrong class", "#c2571a", ":", "^", hollow=True),
}
RULES = {
    "features": Look("variance rule of w random hidden units", "#0b4f8a", "-", "D"),
    "gp_pec_999": Look("GP-PEC, teacher with 999 outputs", "#0b6e4f", "--", "s"),
    "gp_pec_99": Look("GP-PEC, teacher with 99 outputs", "#7a4a9e", "--", "o", hollow=True),
    "pec": Look("PEC, students of width 100", "#c2571a", "-.", "^"),
    "pec_small": Look("PEC, students of width 10", "#555555", ":", "v"),
}
GP_PEC = Look("GP-PEC(B)", "#0b6e4f", "--", "s")
RULE = Look("variance rule", "black", "-", "")


def curve(axes: Any, look: Look, rows: list[Row], x: str, key: str) -> None:
    """Draw means over the seeds, and their standard errors as a shade."""
    places = sorted({row[x] for row in rows})
    values = [[row[key] for row in rows if row[x] == place] for place in places]
    means = np.asarray([np.mean(some) for some in values])
    errors = np.asarray([standard_error(some) for some in values])
    axes.fill_between(places, means - errors, means + errors, color=look.color, alpha=0.2, lw=0)
    axes.plot(
        places,
        means,
        color=look.color,
        linestyle=look.line,
        marker=look.marker,
        markersize=4,
        markerfacecolor="white" if look.hollow else look.color,
        label=look.label,
    )


def below(figure: Any, axes: Any, columns: int) -> None:
    """Put the legend of one panel under all of them."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns)


def draw_samples(rows: list[Row]) -> None:
    """Draw scores over the number of samples, a panel for each kind of data."""
    figure = blank(11, 4.4)
    for panel, (name, (title, _, _)) in zip(
        figure.subplots(1, len(PANELS)), PANELS.items(), strict=True
    ):
        mine = [row for row in rows if row["panel"] == name]
        for key, look in SCORES.items():
            curve(panel, look, mine, "samples", key)
        panel.set(xscale="log", yscale="log", title=title, xlabel="samples of a class")
        lowest = min(row["gp_pec_1"] for row in mine)  # training errors of few samples are lower
        panel.set_ylim(10 ** np.floor(np.log10(lowest)), 2)
    figure.axes[0].set_ylabel("score / variance of the prior")
    below(figure, figure.axes[0], 3)
    save(figure, DOCS / "theory-samples.png")


def draw_agreement(
    name: str, x: str, label: str, papers: int, curves: list[tuple[Look, str, list[Row]]]
) -> None:
    """Draw agreement with the rule, and accuracy, over one thing; mark the paper's choice of it."""
    figure = blank(11, 4.8)
    left, right = figure.subplots(1, 2, sharey=True)
    for look, key, rows in curves:
        curve(left, look, rows, x, f"gp = {key}")
        curve(right, look, rows, x, f"{key} right")
    curve(right, RULE, curves[0][2], x, "gp right")
    left.set(ylabel="agrees with the variance rule (%)", ylim=(10, 101))
    right.set(ylabel="accuracy (%)")
    for axes in (left, right):
        axes.set(xscale="log", xlabel=label)
        axes.axvline(papers, color="0.6", lw=0.8, ls=(0, (1, 3)))
        axes.annotate("the paper's", (papers, 12), rotation=90, ha="right", color="0.4")
    below(figure, right, 3)
    save(figure, DOCS / f"theory-{name}.png")


WIDTH_COLUMNS = {
    "PEC and the rule": "gp = pec",
    "PEC and GP-PEC(99)": "pec = gp_pec_99",
    "GP-PEC(99) and the rule": "gp = gp_pec_99",
    "GP-PEC(999) and the rule": "gp = gp_pec_999",
    "accuracy of PEC": "pec right",
    "of GP-PEC(99)": "gp_pec_99 right",
    "of the rule": "gp right",
}
DRAW_COLUMNS = {
    "GP-PEC(B) and the rule": "gp = gp_pec",
    "PEC and the rule": "gp = pec",
    "accuracy of GP-PEC(B)": "gp_pec right",
    "of PEC": "pec right",
}
STUDENT_COLUMNS = {
    "s_∞, right class": "score",
    "σ², right class": "variance",
    "s_∞, best wrong class": f"score{WRONG}",
    "agrees with the rule": "gp = student",
    "accuracy": "student right",
}


def table(rows: list[Row], key: str, columns: dict[str, str]) -> str:
    """Return Markdown with a line for each value of a key; means and standard errors."""
    lines = [f"| {' | '.join([key, *columns])} |", "|---" * (1 + len(columns)) + "|"]
    for place in dict.fromkeys(row[key] for row in rows):
        mine = [row for row in rows if row[key] == place]
        cells = [
            with_error([row[column] for row in mine if column in row])
            for column in columns.values()
        ]
        name = f"{place:,}" if isinstance(place, int) else place
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(rows: list[Row]) -> None:
    """Draw the figures and put the tables into the page."""
    by: dict[str, list[Row]] = {}
    for row in rows:
        by.setdefault(row["experiment"], []).append(row)
    draw_samples(by["samples"])
    draws = [(GP_PEC, "gp_pec", by["draws"]), (RULES["pec"], "pec", by["outputs"])]
    draw_agreement("draws", "draws", "functions drawn, or outputs (B)", OUTPUTS, draws)
    widths = [(look, key, by["width"]) for key, look in RULES.items()]
    draw_agreement("width", "width", "width of the teacher (w)", TEACHER, widths)
    page = DOCS / "theory.md"
    put(table(by["draws"] + by["outputs"], "draws", DRAW_COLUMNS), page, "draws")
    put(table(by["width"], "width", WIDTH_COLUMNS), page, "widths")
    put(table(by["students"], "student", STUDENT_COLUMNS), page, "students")


EXPERIMENTS = {"samples": over_samples, "agreement": agreements, "outputs": over_outputs}


def main() -> None:
    """Run experiments, or write the page about them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="*", choices=[[], *EXPERIMENTS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="only write page and figures")
    arguments = parser.parse_args()
    for name in arguments.experiments:
        for seed in arguments.seeds:
            for row in EXPERIMENTS[name](seed):
                print(json.dumps(row), flush=True)
                keep(RESULTS, [row])
    if arguments.table:
        write_page(kept(RESULTS))


if __name__ == "__main__":
    main()
