import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pandas
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


@pytest.fixture
def kept(tmp_path):
    return store.Store(tmp_path / "store.sqlite")


def whole(seed=0, accuracy=0.5):
    return replace(
        result(seed, accuracy),
        confusion=[[3, 1], [0, 2]],
        accuracy_per_class_after_task=[{"0": 1.0}, {"0": accuracy}],
        macs=12,
    )


def test_a_store_gives_back_what_was_added_in_order(kept):
    assert (list(kept.results()), len(kept), kept.get("0" * 16)) == ([], 0, None)
    written = [whole(seed) for seed in (3, 1, 2)]
    for one in written:
        kept.add(one)
    assert list(kept.results()) == written
    assert written[1].experiment.key in kept
    assert kept.get(written[1].experiment.key) == written[1]
    brief = list(kept.results(details=False))
    assert [one.confusion for one in brief] == [None] * 3
    assert [replace(one, confusion=[[3, 1], [0, 2]]).macs for one in brief] == [12] * 3


def test_a_later_result_takes_the_place_of_an_earlier_one_which_stays_on_record(kept):
    kept.add(whole(accuracy=0.1), whole(1))
    kept.add(whole(accuracy=0.2))
    assert sorted(one.accuracy for one in kept.results()) == [0.2, 0.5]
    with closing(sqlite3.connect(kept.path)) as database:
        ((old,),) = database.execute("SELECT result FROM replaced")
    assert json.loads(old)["accuracy"] == 0.1


def test_a_result_that_cannot_be_written_leaves_no_trace(kept):
    with pytest.raises(ValueError):
        kept.add(whole(0), whole(1, accuracy=float("nan")))
    assert len(kept) == 0


DAMAGE = {
    "cut": "result = substr(result, 1, 40)",
    "changed": "result = replace(result, '0.5', '0.9')",
    "no text": "result = CAST(x'fffe00' AS TEXT)",
    "details": "details = substr(details, 1, 10)",
    "key": "key = 'abc'",
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_row_is_set_aside_reported_and_run_again(kept, what):
    kept.add(*(whole(seed) for seed in range(3)))
    with closing(sqlite3.connect(kept.path)) as database:
        database.execute(f"UPDATE results SET {DAMAGE[what]} WHERE number = 2")
        database.commit()
    assert [one.experiment.seed for one in kept.results()] == [0, 2]
    (broken,) = kept.damaged()
    assert str(broken).startswith(f"{kept.path}, row 2: ")
    assert [one.experiment.seed for one in kept.results()] == [0, 2]
    assert whole(1).experiment.key not in kept
    kept.add(whole(1))
    assert len(list(kept.results())) == 3
    assert what == "key" or not kept.damaged()


def test_what_is_no_store_is_refused(tmp_path):
    (tmp_path / "text.sqlite").write_text("not a database, but a text of some length\n" * 30)
    with pytest.raises(ValueError, match="expected a store of results at .*text.sqlite"):
        list(store.Store(tmp_path / "text.sqlite").results())
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        store.Store(tmp_path / "no" / "s.sqlite").add(whole())


def test_the_path_is_given_or_of_the_environment_or_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PECIL_STORE", raising=False)
    store.Store().add(whole())
    assert len(store.Store("results/store.sqlite")) == 1
    monkeypatch.setenv("PECIL_STORE", str(tmp_path / "other.sqlite"))
    assert len(store.Store()) == 0


def test_results_go_to_files_and_come_back(kept, tmp_path):
    written = [whole(seed) for seed in (2, 0, 10)]
    kept.add(*written)
    for kind in ("jsonl", "csv", "parquet"):
        assert kept.export(tmp_path / f"all.{kind}") == 3
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [0, 2, 10]
    tables = pandas.read_csv(tmp_path / "all.csv"), pandas.read_parquet(tmp_path / "all.parquet")
    for table in tables:
        assert table["accuracy"].tolist() == [0.5] * 3
        assert json.loads(table["confusion"][0]) == [[3, 1], [0, 2]]
    with pytest.raises(ValueError, match="ends in .jsonl, .csv, .parquet, got .*all.txt"):
        kept.export(tmp_path / "all.txt")

    other = store.Store(tmp_path / "other.sqlite")
    other.add(whole(2, accuracy=0.7))
    with open(tmp_path / "all.jsonl", "a") as file:
        file.write("{\n")
    added, damaged = other.import_([tmp_path / "all.jsonl", kept.path])
    assert (added, [part.line for part in damaged]) == (2, [4])
    assert other.get(whole(2).experiment.key).accuracy == 0.7  # what is there stays
    assert other.get(whole(10).experiment.key) == whole(10)


def test_a_brief_export_has_no_details(kept, tmp_path):
    kept.add(whole())
    kept.export(tmp_path / "brief.jsonl", details=False)
    ((row,), _) = store.read_lines([tmp_path / "brief.jsonl"])
    assert (row.confusion, row.accuracy_per_class_after_task, row.macs) == (None, None, 12)


def test_published_results_keep_their_keys():
    files = sorted((Path(__file__).parents[2] / "results").glob("*.jsonl"))
    assert files
    found, damaged = store.read_lines(files)  # a key that is not the experiment's is damage
    assert (len(found) > 50, damaged) == (True, [])


def write(path, first):
    kept = store.Store(path)
    for seed in range(first, first + 25):
        kept.add(whole(seed))
        assert kept.get(whole(seed).experiment.key) == whole(seed)


def test_several_processes_may_write_at_once(tmp_path):
    """All begin with no file there."""
    path = tmp_path / "store.sqlite"
    program = "import sys, test_store; test_store.write(sys.argv[1], int(sys.argv[2]))"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    writers = [
        subprocess.Popen([sys.executable, "-c", program, path, str(100 * k)], env=environment)
        for k in range(3)
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    found = sorted(one.experiment.seed for one in store.Store(path).results())
    assert found == [100 * k + seed for k in range(3) for seed in range(25)]


def test_a_claim_holds_while_its_process_lives(kept):
    key = whole().experiment.key
    program = """
import sys, time
from pecil.bench.store import Store
with Store(sys.argv[1]).claim(sys.argv[2]) as ours:
    print(ours, flush=True)
    time.sleep(60)
"""
    other = subprocess.Popen(
        [sys.executable, "-c", program, kept.path, key], stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout.readline() == "True\n"
        with kept.claim(key) as ours:
            assert not ours
        with kept.claim(whole(1).experiment.key) as ours:
            assert ours
        other.kill()
        with kept.claim(key, wait=True) as ours:
            assert ours


def test_of_two_that_make_the_store_the_first_one_s_file_stays(tmp_path, monkeypatch):
    first, link = store.Store(tmp_path / "store.sqlite"), os.link

    def too_late(made, path):
        monkeypatch.setattr(os, "link", link)
        first.add(whole(1))
        link(made, path)

    monkeypatch.setattr(os, "link", too_late)
    second = store.Store(first.path)
    second.add(whole(2))
    assert [one.experiment.seed for one in second.results()] == [1, 2]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
