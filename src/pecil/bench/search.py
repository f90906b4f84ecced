"""Search for settings, as the paper does it.

Every combination of a grid (``grids.toml``) learns nine tenths of the training part, one seed,
and is tested on the last tenth, which is held out at random; the best one wins. The test part
has no say in it.
"""

import functools
import itertools
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from pecil.bench.experiment import Experiment, Progress, Result, planned, shape_of
from pecil.methods import METHODS, check_settings

Grid = Mapping[str, Sequence[Any]]


def grid_for(
    method: str, changes: Grid | None = None, dataset: str | None = None
) -> dict[str, Sequence[Any]]:
    """Return the values to try of each setting of a method, some of them changed.

    Augmentation is for colour pictures: it is not tried on a dataset of anything else.

    >>> grid_for("pec", {"lr": [0.01, 0.03]})
    {'lr': [0.01, 0.03], 'batch_size': [1], 'schedule': ['linear']}
    """
    if method not in METHODS:
        raise ValueError(f"expected a method out of {', '.join(METHODS)}, got {method!r}")
    settings = METHODS[method].settings
    check_settings(method, changes or (), settings)
    grids = _grids()
    common = {name: values for name, values in grids["common"].items() if name in settings}
    grid = common | grids.get(method, {}) | dict(changes or {})
    if not grid:
        raise ValueError(
            f"there is no grid for {method}: say which values to try of {', '.join(settings)}"
        )
    if dataset is not None and len(shape_of(dataset)) < 3:
        grid.pop("augment", None)
    for name, values in grid.items():
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ValueError(f"{name}: expected a list of values to try, got {values!r}")
    return grid


@functools.cache
def _grids() -> dict[str, dict[str, Sequence[Any]]]:
    return tomllib.loads(
        (resources.files("pecil.bench") / "grids.toml").read_text(encoding="utf-8")
    )


def candidates(grid: Grid, method: str, dataset: str, **options: Any) -> list[Experiment]:
    """Return an experiment on held-out samples for every combination of a grid.

    Parameters
    ----------
    grid : mapping
        Values to try by setting, see `grid_for`.
    method, dataset, **options
        As for `pecil.bench.planned`.

    Examples
    --------
    >>> [e.settings["lr"] for e in candidates({"lr": [0.1, 0.3]}, "pec", "digits", seed=1)]
    [0.1, 0.3]
    """
    return [
        planned(method, dataset, validation=True, **options | combination)
        for combination in _combinations(grid)
    ]


def _combinations(grid: Grid) -> Iterable[dict[str, Any]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def best(results: Iterable[Result]) -> Result:
    """Return the result of the highest accuracy, the first of several."""
    return max(results, key=lambda result: result.accuracy)


def winner(best: Result, seed: int) -> Experiment:
    """Return the experiment with the settings found, on the whole data."""
    return replace(best.experiment, validation=False, seed=seed)


def tpe(
    grid: Grid,
    trials: int,
    carry_out: Callable[[Experiment], Result],
    method: str,
    dataset: str,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> list[Result]:
    """Search by Optuna's tree-structured Parzen estimator, one trial after the other.

    Fractions are drawn from the grid's least to its greatest, on a logarithmic scale where that
    is possible; anything else is one of the grid's values.

    Parameters
    ----------
    grid : mapping
        Values by setting, see `grid_for`.
    trials : int
        How many combinations to try.
    carry_out : callable
        Runs an experiment, or knows its result: the trials are the same in every search.
    method, dataset, **options
        As for `pecil.bench.planned`.
    progress : callable, optional
        Called with the trials done and the trials in all.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError('--sampler tpe needs Optuna: pip install "pecil[search]"') from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=options.get("seed", 0))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    results = []
    for done in range(trials):
        if progress is not None:
            progress(done, trials)
        trial = study.ask()
        chosen = {name: _suggested(trial, name, values) for name, values in grid.items()}
        result = carry_out(planned(method, dataset, validation=True, **options | chosen))
        study.tell(trial, result.accuracy)
        results.append(result)
    return results


def _suggested(trial: Any, name: str, values: Sequence[Any]) -> Any:
    """Let Optuna choose a value."""
    if len(values) == 1:
        return values[0]
    if any(isinstance(value, float) for value in values):
        return trial.suggest_float(name, min(values), max(values), log=min(values) > 0)
    return trial.suggest_categorical(name, values)
