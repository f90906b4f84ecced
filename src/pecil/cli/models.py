"""Commands for models of your own: fit, features, learn, predict, info, merge."""

import csv
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

import pecil
from pecil.cli.common import (
    Changes,
    Data,
    Device,
    Json,
    Label,
    Model,
    Output,
    check_output,
    of_models,
    print_facts,
    print_json,
    print_table,
    progress,
    settings_of,
)
from pecil.files import written_whole

if TYPE_CHECKING:
    from pecil import PEC, WhitenedPEC
    from pecil.data import Dataset
    from pecil.methods.learner import Array

    Classifier = PEC | WhitenedPEC

CHUNK = 1000  # samples between two updates of a progress bar
OF_WHITENED, OF_PEC = "Options of whitened_pec", "Options of pec"  # headings in the help


class Estimator(StrEnum):
    """What can be fitted and saved."""

    WHITENED_PEC = "whitened_pec"
    PEC = "pec"


@of_models()
def fit(
    data: Data,
    output: Output,
    method: Annotated[
        Estimator, typer.Option(help="whitened_pec: exact and accurate; pec: the paper's own.")
    ] = Estimator.WHITENED_PEC,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="auto, natural, strokes, signs, synthetic, relu, rbf, identity and others.",
            rich_help_panel=OF_WHITENED,
        ),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Numbers to hold.", rich_help_panel=OF_WHITENED)
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(
            help="auto, mlp, conv or linear: of students and teacher.", rich_help_panel=OF_PEC
        ),
    ] = None,
    student_width: Annotated[
        int | None, typer.Option(help="Hidden units of a student.", rich_help_panel=OF_PEC)
    ] = None,
    teacher_width: Annotated[
        int | None, typer.Option(help="Hidden units of the teacher.", rich_help_panel=OF_PEC)
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Parameters per class.", rich_help_panel=OF_PEC)
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of Adam.", rich_help_panel=OF_PEC)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data.", rich_help_panel=OF_PEC)
    ] = None,
    standardise: Annotated[
        bool,
        typer.Option(
            "--standardise",
            help="Bring each feature, or channel of images, to mean 0 and deviation 1.",
        ),
    ] = False,
    changes: Changes = None,
    seed: Annotated[int, typer.Option(help="Decides the teacher; equal in models to merge.")] = 0,
    label: Label = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Learn DATA from nothing and save the model; test it if there is a test part.

    A dataset of the benchmark starts from the benchmark's settings.
    Inputs should be of order one (uint8 is divided by 255): see --standardise.
    """
    import numpy as np

    _check_model_output(output, data)
    settings = settings_of(changes)
    if standardise and {"mean", "std"} & set(settings):
        raise typer.BadParameter("give --standardise or mean and std, not both")
    options = {
        "teacher": teacher,
        "memory": memory,
        "architecture": architecture,
        "student_width": student_width,
        "teacher_width": teacher_width,
        "budget": budget,
        "lr": lr,
        "epochs": epochs,
        "random_state": seed,
        "device": device,
    }
    given = {name: value for name, value in options.items() if value is not None}
    model = _new(method, data, given | settings)
    samples = _load(data, label)
    if standardise:
        model.set_params(**_statistics(model, samples.train_x))
    elif model.mean is None and model.std is None:
        model.set_params(mean=samples.mean, std=samples.std)
    with progress(f"learning {len(samples.train_x):,} samples"):
        model.fit(samples.train_x, samples.train_y)
    if samples.feature_names:
        model.feature_names_in_ = np.array(samples.feature_names, dtype=object)
    model.save(output)
    _print_saved(model, output, samples, as_json)


@of_models()
def features(
    data: Data,
    network: Annotated[
        str,
        typer.Option(help=r"timm:NAME, pre-trained (needs pecil\[timm]); or a TorchScript file."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to save them, an .npz.")],
    size: Annotated[
        int | None, typer.Option(min=1, help="Height and width that images are brought to.")
    ] = None,
    changes: Changes = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Where finished parts are kept; else features/ beside the datasets."),
    ] = None,
    label: Label = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compute the features of images by a frozen network; the file is a dataset to learn from.

    Stop it as you like: it goes on where it stopped.
    """
    import numpy as np

    from pecil.data import Features
    from pecil.data.registry import data_folder
    from pecil.methods import check_settings

    check_output(output, data, network)
    if output.suffix.lower() != ".npz":
        raise ValueError(f"expected a name that ends in .npz for the features, got {output}")
    extractor = Features(network, size=size, device=device)
    given, own = settings_of(changes), {"network", "size", "device", "cache"}
    check_settings("Features", given, sorted(set(extractor.get_params()) - own))
    extractor.set_params(cache=cache or data_folder() / "features", **given).fit()
    samples = _load(data, label, labelled=False, on_disk=True)
    parts = {"train": (samples.train_x, samples.train_y)}
    if samples.test_x is not None:
        parts["test"] = (samples.test_x, samples.test_y)
    arrays: dict[str, Any] = {"note": f"features of {samples.name} by {network}"}
    for part, (x, y) in parts.items():
        arrays[f"{part}_x"] = extractor.transform(x)
        if y is not None:
            arrays[f"{part}_y"] = y
    with written_whole(output) as temporary:
        np.savez(temporary, **arrays)
    facts = {
        "output": output,
        "samples": sum(len(x) for x, _ in parts.values()),
        "n_features": arrays["train_x"].shape[1],
    }
    (print_json if as_json else print_facts)(facts)


@of_models()
def learn(
    model: Model,
    data: Data,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to save; by default the model's own file."),
    ] = None,
    label: Label = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Go on learning: more samples of known classes, and new classes."""
    target = output or model
    _check_model_output(target, data)
    learner = _model(model, device)
    samples = _load_for(learner, data, label)
    labels = _known(learner, samples.train_y)
    if isinstance(learner, pecil.PEC):
        learner.set_params(expected_samples=_expected(learner, labels))
    with progress(f"learning {len(samples.train_x):,} samples"):
        learner.partial_fit(samples.train_x, labels)
    learner.save(target)
    _print_saved(learner, target, samples, as_json)


@of_models()
def predict(
    model: Model,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A dataset's name; or a folder of images, an .npz, .csv or .parquet, with labels "
            "or without.",
        ),
    ],
    novelty: Annotated[bool, typer.Option("--novelty", help="Add the smallest error.")] = False,
    reject_as: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="The label of samples that resemble no known class."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A CSV file; by default print it.")
    ] = None,
    label: Label = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Name the class of every sample, as CSV; of the test part where there is one.

    The samples need no labels; those that have labels tell the accuracy,
    on standard error if the predictions are printed.
    """
    if output is not None:
        check_output(output, model, data)
    learner = _model(model, device)
    samples = _load_for(learner, data, label, labelled=False)
    x, y, files = samples.test_x, samples.test_y, samples.test_files
    if x is None:
        x, y, files = samples.train_x, samples.train_y, samples.train_files
    rows = _predictions(learner, x, novelty, reject_as, files)
    facts: dict[str, Any] = {"samples": len(rows)}
    if y is not None:
        facts["accuracy"] = _accuracy(rows, y)
    if output is not None:
        with (
            written_whole(output) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as file,
        ):
            _write_csv(file, rows)
        facts["output"] = output
    if as_json:
        print_json(facts if output else facts | {"predictions": rows})
    elif output is None:
        _write_csv(sys.stdout, rows)
        if y is not None:
            print_facts({"accuracy": facts["accuracy"]}, file=sys.stderr)
    else:
        print_facts(facts)


@of_models()
def info(model: Model, as_json: Json = False) -> None:
    """Show what a saved model is and knows."""
    facts = _facts(model)
    if as_json:
        print_json(facts)
    else:
        classes = [(str(c["label"]), f"{c['samples']:,}") for c in facts.pop("classes")]
        print_facts(facts | facts.pop("settings"))
        print_table(("class", "samples seen"), classes)


@of_models()
def merge(
    models: Annotated[list[Path], typer.Argument(help="Two models or more.")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Put models that learned apart together; nothing is trained again.

    Models of whitened_pec may know the same classes, those of pec may not.
    """
    if len(models) < 2:
        raise typer.BadParameter("expected two models or more")
    _check_model_output(output)
    merged: Any = _model(models[0], "cpu")
    for path in models[1:]:
        other = _model(path, "cpu")
        _check_alike(merged, other, path)
        merged.merge(other)
    merged.save(output)
    _print_saved(merged, output, None, as_json)


def _new(method: Estimator, data: str, given: Mapping[str, Any]) -> Any:
    """Make a model with the settings given, and else with those chosen for the dataset."""
    from pecil.bench.experiment import settings_for
    from pecil.data import DATASETS
    from pecil.methods import METHODS, check_settings, whitened_pec

    make: Callable[..., Any] = whitened_pec if method is Estimator.WHITENED_PEC else pecil.PEC
    owner, options = METHODS[method].title, _options(method)
    if unknown := set(given) - options:
        for other in Estimator:
            if unknown <= _options(other):
                owner += f", unlike --method {other},"
        check_settings(owner, unknown, sorted(options))
    settings = settings_for(method, data, **given)
    if data in DATASETS and "expected_classes" in options:
        settings.setdefault("expected_classes", DATASETS[data].n_classes)
    return make(**settings)


def _options(method: Estimator) -> set[str]:
    """Return what can be said of an estimator, without what the benchmark adds to it."""
    from pecil.methods import METHODS

    options = set(METHODS[method].options)
    return options if method is Estimator.WHITENED_PEC else options & set(pecil.PEC().get_params())


def _check_model_output(path: Path, *inputs: str) -> None:
    """Refuse a bad place for a model before any work begins, such as a file of another kind."""
    from pecil.pec.saving import is_model

    check_output(path, *inputs)
    if path.exists() and path.stat().st_size and not is_model(path):
        raise ValueError(
            f"cannot write {path}: it is there and is no pecil model; choose another name"
        )


def _model(path: Path, device: str) -> "Classifier":
    return cast("Classifier", pecil.load(path, device=device))


def _load(data: str, label: str | None, labelled: bool = True, on_disk: bool = False) -> "Dataset":
    from pecil.data import load

    return load(data, label=label, labelled=labelled, on_disk=on_disk)


def _load_for(
    model: "Classifier", data: str, label: str | None, labelled: bool = True
) -> "Dataset":
    """Load samples in the form of those that the model learned from."""
    samples = _load(data, label, labelled)
    columns = _columns(model, samples.feature_names, data)
    train_x, test_x = _in_form(model, samples.train_x, columns, data), samples.test_x
    if test_x is not None:
        test_x = _in_form(model, test_x, columns, data)
    return replace(samples, train_x=train_x, test_x=test_x)


def _columns(model: "Classifier", names: Sequence[str] | None, data: str) -> list[int] | None:
    """Return where in a table the features are that the model learned from, if it has names."""
    learned = getattr(model, "feature_names_in_", None)
    if names is None or learned is None:
        return None
    place, known = {name: k for k, name in enumerate(names)}, set(learned)
    missing = [name for name in learned if name not in place]
    unknown = [name for name in names if name not in known]
    if missing or unknown:
        found = [f"without {_some(missing)}"] if missing else []
        found += [f"with {_some(unknown)}"] if unknown else []
        raise ValueError(
            f"{data}: expected the columns that the model learned from, found them "
            f"{', '.join(found)} (--label names the column of labels)"
        )
    return [place[name] for name in learned]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if names[10:] else ""
    return ", ".join(map(repr, names[:10])) + more


def _in_form(model: "Classifier", x: "Array", columns: Sequence[int] | None, data: str) -> "Array":
    """Put columns in order and make grey images colour, for a model of colour images."""
    import numpy as np

    if columns is not None:
        return np.take(x, columns, axis=1)
    if len(model.input_shape_) < 3 or x.ndim < 3:
        return x
    channels, *size = model.input_shape_
    if size not in (list(x.shape[1:3]), list(x.shape[2:])):
        raise ValueError(
            f"{data}: the images are {'x'.join(map(str, x.shape[1:]))}, but the model learned from "
            f"{'x'.join(map(str, size))} (height x width): resize them, or learn from features of "
            "images of any size (pecil features --size)"
        )
    if x.ndim == 3 and channels == 3:
        return np.stack([x] * 3, axis=1 if model.channels == "first" else 3)
    return x


def _known(model: "Classifier", labels: "Array") -> "Array":
    """Take labels that are written like those of known classes for them: "1" for 1."""
    from pecil.pec.inputs import label_array

    known = model.samples_seen_
    written = {_written(label): label for label in known}
    return label_array([c if c in known else written.get(_written(c), c) for c in labels.tolist()])


def _written(label: Any) -> str:
    """Write a label as a folder's name would have it."""
    return str(int(label) if isinstance(label, float) and label.is_integer() else label)


def _check_alike(model: "Classifier", other: "Classifier", path: Path) -> None:
    """Refuse to merge models that differ in columns or in how the same label is written."""
    mine, theirs = (list(getattr(one, "feature_names_in_", ())) for one in (model, other))
    if mine and theirs and mine != theirs:
        raise ValueError(
            f"cannot merge {path}: it learned from the columns {_some(theirs)}, not {_some(mine)}"
        )
    known = model.samples_seen_
    written = {_written(label): label for label in known}
    for label in other.samples_seen_:
        if label not in known and _written(label) in written:
            raise ValueError(
                f"cannot merge {path}: it knows {label!r}, the other {written[_written(label)]!r}; "
                "give both labels of one kind"
            )


def _statistics(model: Any, x: "Array") -> dict[str, list[float]]:
    """Return mean and std of each feature, or channel, as the model sees them; no std is zero."""
    import numpy as np
    from sklearn.preprocessing import StandardScaler

    from pecil.pec.inputs import LARGEST, check_samples

    raw: Any = check_samples(model, x, reset=True, layout=model.channels)
    scaler, unit = StandardScaler(), 255 if raw.dtype == np.uint8 else 1
    for start in range(0, len(raw), CHUNK):
        values = np.moveaxis(raw[start : start + CHUNK], 1, -1).reshape(-1, raw.shape[1])
        scaler.partial_fit(values.astype(np.float64) / unit)
    std = np.where(scaler.scale_ < 1 / LARGEST, 1, scaler.scale_)
    return {"mean": scaler.mean_.tolist(), "std": std.tolist()}


def _expected(model: "PEC", labels: "Array") -> Any:
    """Let the learning rate of new classes fall over the samples that are there."""
    given, known = model.expected_samples, model.samples_seen_
    if isinstance(given, int):
        return given
    return {**(given or {}), **Counter(c for c in labels.tolist() if c not in known)}


def _predictions(
    model: "Classifier",
    x: "Array",
    novelty: bool = False,
    reject_as: str | None = None,
    files: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Predict chunk by chunk: one row (index, file if known, label, novelty if asked) a sample."""
    options = {} if reject_as is None else {"reject_as": _of_kind(model, reject_as)}
    if options and not hasattr(model, "threshold_"):
        model.calibrate()
    rows: list[dict[str, Any]] = []
    with progress(f"predicting {len(x):,} samples") as show:
        for start in range(0, len(x), CHUNK):
            chunk = x[start : start + CHUNK]
            if novelty:
                found = _with_novelty(model, chunk, **options)
            else:
                found = [{"label": label} for label in model.predict(chunk, **options).tolist()]
            for answer in found:
                file = {"file": files[len(rows)]} if files else {}
                rows.append({"index": len(rows), **file, **answer})
            show(len(rows), len(x))
    return rows


def _with_novelty(model: "Classifier", x: "Array", **options: Any) -> list[dict[str, Any]]:
    """Return what `predict` and `novelty` say; the errors are computed once."""
    errors = model.errors(x)
    labels, novelty = model.classes_[errors.argmin(1)].tolist(), errors.min(1).tolist()
    if options:
        pairs = zip(labels, novelty, strict=True)
        labels = [options["reject_as"] if n > model.threshold_ else label for label, n in pairs]
    return [{"label": label, "novelty": n} for label, n in zip(labels, novelty, strict=True)]


def _of_kind(model: "Classifier", text: str) -> Any:
    """Read a label: a number where the model's labels are and are written so, else a text."""
    known = {type(label) for label in model.samples_seen_}
    for kind in (int, float):
        with suppress(ValueError):
            if kind in known and _written(kind(text)) == text and abs(kind(text)) < math.inf:
                return kind(text)
    return text


def _accuracy(rows: Sequence[Mapping[str, Any]], y: "Array") -> float:
    """Return the share of right labels, however they are written."""
    pairs = zip(rows, y.tolist(), strict=True)
    return sum(_written(row["label"]) == _written(label) for row, label in pairs) / len(y)


def _write_csv(file: TextIO, rows: Sequence[Mapping[str, Any]]) -> None:
    writer = csv.DictWriter(file, fieldnames=rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _facts(path: Path) -> dict[str, Any]:
    """Return what there is to say about a saved model."""
    from pecil.pec.inputs import in_order
    from pecil.pec.saving import describe

    about = describe(path)
    labels, seen = about["labels"], about["seen"]
    return {
        "model": path,
        "kind": about["model"],
        "bytes": path.stat().st_size,
        "input_shape": about["input_shape"],
        **about.get("sizes", {}),
        "classes": [{"label": labels[k], "samples": seen[k]} for k in in_order(labels)],
        "settings": about["parameters"],
    }


def _print_saved(model: "Classifier", path: Path, samples: "Dataset | None", as_json: bool) -> None:
    """Report on a model just saved, with its accuracy where there are samples to test it."""
    facts = _facts(path)
    if samples is not None and samples.test_x is not None and samples.test_y is not None:
        rows = _predictions(model, samples.test_x)
        facts["accuracy"] = _accuracy(rows, samples.test_y)
    if as_json:
        print_json(facts)
    else:
        print_facts(facts | {"classes": len(facts["classes"]), "settings": None})
