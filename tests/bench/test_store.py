import json

import pytest

from pecil.bench import Experiment, Result, store


def result(seed=0, accuracy=0.5, **settings):
    return Result(
        Experiment("pec", "digits", "10/1", seed, settings),
        accuracy=accuracy,
        accuracy_per_class={"0": accuracy},
        accuracy_after_task=[1.0, accuracy],
        seconds={"load": 0.1, "fit": 0.2, "test": 0.3},
        n_parameters=7,
        device="cpu",
        versions={"pecil": "0"},
    )


def test_what_is_appended_is_read_in_order(tmp_path):
    path = tmp_path / "runs.jsonl"
    written = [result(seed, lr=0.01, hidden=[5, 5]) for seed in (3, 1, 2)]
    for one in written:
        store.append_line(path, one)
    assert store.read_lines([path]) == (written, [])
    assert len(path.read_text().splitlines()) == 3


def test_the_last_run_of_an_experiment_counts_across_files(tmp_path):
    store.append_line(tmp_path / "a.jsonl", result(accuracy=0.1))
    store.append_line(tmp_path / "b.jsonl", result(accuracy=0.2))
    store.append_line(tmp_path / "b.jsonl", result(accuracy=0.3, lr=0.5))
    found, damaged = store.read_lines([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [one.accuracy for one in found] == [0.2, 0.3]
    assert not damaged


def test_a_line_cut_short_is_reported_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "runs.jsonl"
    store.append_line(path, result(0))
    store.append_line(path, result(1))
    path.write_bytes(path.read_bytes()[:-20])
    store.append_line(path, result(2))
    found, damaged = store.read_lines([path])
    assert [one.experiment.seed for one in found] == [0, 2]
    assert [line.line for line in damaged] == [2]
    assert str(damaged[0]).startswith(f"{path}, line 2: ")


def changed(**entries):
    return json.dumps(result().row() | entries).encode()


def without(name):
    row = result().row()
    del row[name]
    return json.dumps(row).encode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\xff\xfe\x00", "codec"),
        (b"[1, 2]", "expected a JSON object, got list"),
        (without("seconds"), "lacks seconds"),
        (without("key"), "lacks key"),
        (changed(seed=99), "is not that of the experiment"),
        (changed(settings={"lr": 3}), "is not that of the experiment"),
        (changed(accuracy="high"), "accuracy from 0 to 1, got 'high'"),
        (changed(accuracy=92.3), "accuracy from 0 to 1, got 92.3"),
    ],
)
def test_what_is_no_result_is_reported_with_the_reason(tmp_path, line, reason):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(line + b"\n\n")
    store.append_line(path, result())
    found, damaged = store.read_lines([path])
    assert found == [result()]
    assert len(damaged) == 1
    assert reason in damaged[0].reason
