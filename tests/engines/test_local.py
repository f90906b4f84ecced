import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path
from sqlite3 import connect

import pytest

from pecil.bench import planned
from pecil.bench.store import Store
from pecil.engines import engine, local

PROGRAM = """
import dataclasses, json, os, random, signal, sys, time
from pathlib import Path
from pecil.bench import Experiment, planned
from pecil.bench.store import Store
from pecil.engines import local
from pecil.data import load
from pecil.methods import METHODS

load("digits")  # imports what it needs
local.START = "fork"  # all is imported already: workers start at once
folder = Path(sys.argv[1])
methods = ("nearest_mean", "slda")
experiments = [planned(m, "digits", seed=seed) for m in methods for seed in range(75)]

def begin(name):
    # Sweep in a group of processes of its own.
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        report = local.run_all(experiments, Store(folder / name), workers=2)
        os._exit(len(report.failed) or (len(report.done) != len(experiments)))
    os.setpgid(pid, pid)  # whoever of the two is first
    return pid

def end(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

told = {"undisturbed": end(begin("undisturbed.sqlite")), "counts": [], "alive": []}
chance = random.Random(0)
killed = Store(folder / "killed.sqlite")
for k in range(10):  # a random moment of each tenth or so, never after the end
    pid, enough = begin("killed.sqlite"), 13 * k + chance.randrange(8)
    while len(killed) < enough:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.03))
    told["alive"].append(os.waitpid(pid, os.WNOHANG) == (0, 0))
    os.killpg(pid, signal.SIGKILL)
    end(pid)
    told["counts"].append(len(killed))
told["resumed"] = end(begin("killed.sqlite"))

told["both"] = [end(pid) for pid in [begin("shared.sqlite"), begin("shared.sqlite")]]

class Dies(METHODS["nearest_mean"].learner):
    def __init__(self, *shape, seed, **given):
        with (folder / f"died-{seed}").open("a") as file:
            file.write("!")
        deaths = len((folder / f"died-{seed}").read_text())
        if seed == 0 or deaths == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(*shape, seed=seed, **given)

METHODS["dies"] = dataclasses.replace(METHODS["nearest_mean"], name="dies", learner=Dies)
steps = []
report = local.run_all(
    [
        Experiment("dies", "digits", seed=0),
        Experiment("dies", "digits", seed=1),
        planned("pec", "digits", lr=-1.0),
        planned("nearest_mean", "digits", seed=7),
        planned("nearest_mean", "digits", seed=7),
    ],
    Store(folder / "deadly.sqlite"),
    workers=2,
    progress=lambda *step: steps.append(step),
)
told["steps"] = steps
told["done"] = [Store(folder / "deadly.sqlite").get(key).experiment.seed for key in report.done]
told["failed"] = {f.experiment.method: f.reason for f in report.failed}

class Sleeps(METHODS["nearest_mean"].learner):
    def learn(self, x, y):
        time.sleep(600)

METHODS["sleeps"] = dataclasses.replace(METHODS["nearest_mean"], name="sleeps", learner=Sleeps)
late = Store(folder / "late.sqlite")
awake = planned("nearest_mean", "digits", seed=8)
slow = [Experiment("sleeps", "digits", seed=seed) for seed in range(3)]
report = local.run_all([awake, *slow], late, workers=2, within=5)
told["late"] = [len(report.done), len(report.failed), len(late), late.get(awake.key) is not None]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """Run the program, which has groups of processes to kill; return its folder and words."""
    folder = tmp_path_factory.mktemp("sweeps")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder, json.loads(done.stdout)


def rows(path: Path):
    """Return all that a store holds but what differs from run to run."""
    found = {result.experiment.key: result.row() for result in Store(path).results()}
    for row in found.values():
        del row["seconds"], row["peak_memory"]
    return found


def run_again(path: Path) -> int:
    with closing(connect(path)) as database:
        return database.execute("SELECT COUNT(*) FROM replaced").fetchone()[0]


def test_a_sweep_killed_ten_times_ends_as_if_undisturbed(sweeps):
    folder, told = sweeps
    assert (told["undisturbed"], told["resumed"]) == (0, 0)
    counts = told["counts"]
    assert counts == sorted(counts)  # what is finished stays
    assert told["alive"] == [True] * 10
    assert counts[-1] < 150  # every kill came before the end
    expected = rows(folder / "undisturbed.sqlite")
    assert len(expected) == 150
    assert rows(folder / "killed.sqlite") == expected
    assert run_again(folder / "killed.sqlite") == 0


def test_two_sweeps_into_one_store_lose_nothing_and_run_nothing_twice(sweeps):
    folder, told = sweeps
    assert told["both"] == [0, 0]
    assert rows(folder / "shared.sqlite") == rows(folder / "undisturbed.sqlite")
    assert run_again(folder / "shared.sqlite") == 0


def test_a_dead_worker_is_replaced_and_a_poisoned_experiment_stops_nobody(sweeps):
    folder, told = sweeps
    assert sorted(told["done"]) == [1, 7]  # one of them after a death
    assert (folder / "died-0").read_text() == (folder / "died-1").read_text() == "!!"
    assert told["failed"]["dies"] == "2 workers died of it, exit code -9"
    assert told["failed"]["pec"].startswith("Traceback")
    assert told["failed"]["pec"].endswith(
        "ValueError: lr must be a positive number, but it is -1\n"
    )
    assert told["steps"][0] == [0, 4]
    assert told["steps"][-1] == [4, 4]


def test_what_is_under_way_when_the_time_is_over_is_dropped(sweeps):
    _, told = sweeps
    assert told["late"] == [1, 0, 1, True]


ORPHANED = """
import dataclasses, os, sys, time
from pathlib import Path
from pecil.bench import Experiment
from pecil.bench.store import Store
from pecil.engines import local
from pecil.methods import METHODS

folder = Path(sys.argv[1])

class Sleeps(METHODS["nearest_mean"].learner):
    def learn(self, x, y):
        (folder / f"{os.getpid()}.pid").touch()
        time.sleep(600)

METHODS["sleeps"] = dataclasses.replace(METHODS["nearest_mean"], name="sleeps", learner=Sleeps)
if __name__ == "__main__":
    slow = [Experiment("sleeps", "digits", seed=seed) for seed in range(2)]
    local.run_all(slow, Store(folder / "store.sqlite"), workers=2)
"""


def test_workers_end_with_who_started_them_however_it_ends(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ORPHANED)
    sweep = subprocess.Popen([sys.executable, program, tmp_path])
    until(lambda: len([*tmp_path.glob("*.pid")]) == 2)
    sweep.kill()
    sweep.wait()
    until(lambda: not any(Path("/proc", path.stem).exists() for path in tmp_path.glob("*.pid")))


def until(true):
    """Wait for something to become true, a minute at most."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_each_worker_has_its_place_on_a_gpu(monkeypatch):
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(local, "_cores", lambda: 16)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local.default_workers() == 16
    assert [local._gpu(place) for place in range(4)] == ["0", "1", "0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-abc")
    assert [local._gpu(place) for place in range(3)] == ["5", "GPU-abc", "5"]
    monkeypatch.setattr(local, "_cores", lambda: 3)
    assert local.default_workers() == 3
    monkeypatch.setattr(local, "_cores", lambda: 96)
    assert local.default_workers() == 24


def test_there_are_no_more_workers_than_experiments(tmp_path, monkeypatch):
    started = []

    class Noted(local._Worker):
        def __init__(self, store, place, workers):
            started.append((place, workers))
            super().__init__(store, place, workers)

    monkeypatch.setattr(local, "_Worker", Noted)
    report = local.run_all(
        [planned("nearest_mean", "digits")], Store(tmp_path / "s.sqlite"), workers=4
    )
    assert len(report.done) == 1 and started == [(0, 1)]  # all cores are its own


@pytest.mark.parametrize("permitted", [True, False])
def test_processes_share_a_gpu_through_a_service_that_ends_with_them(
    monkeypatch, tmp_path, permitted
):
    log, control = tmp_path / "log", tmp_path / local.MPS
    control.write_text(
        f"#!/bin/sh\n[ $# = 0 ] && word=$(cat)\n"
        f'echo "$1$word $CUDA_MPS_PIPE_DIRECTORY" >> {log}\nexit {int(not permitted)}\n'
    )
    control.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with local.shared_gpus():
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ  # no GPU
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: 1)
    with local.shared_gpus():
        folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
        assert (folder is not None) == permitted
        with local.shared_gpus():  # there already
            assert os.environ.get("CUDA_MPS_PIPE_DIRECTORY") == folder
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    words = [line.split()[0] for line in log.read_text().splitlines()]
    assert words == (["-d", "quit"] if permitted else ["-d", "-d"])


def test_a_service_that_does_not_end_is_left_behind(monkeypatch, tmp_path):
    control = tmp_path / local.MPS
    control.write_text("#!/bin/sh\n[ $# = 0 ] && exec sleep 60\nexit 0\n")
    control.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(local, "PATIENCE", 0.1)
    with local.shared_gpus():
        assert "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="one worker or more, got 0"):
        local.run_all([], Store(tmp_path / "s.sqlite"), workers=0)
    with pytest.raises(ValueError, match="an engine out of local, ray, got 'slurm'"):
        engine("slurm")


def test_a_worker_waits_for_what_it_met_elsewhere_once(tmp_path, monkeypatch):

    waits = []

    @contextmanager
    def claim(store, key, *, wait=False):  # of something that is under way for a while
        waits.append(wait)
        yield wait or len(waits) > 9

    class Thread(local._Worker):
        def __init__(self, store, place, workers):
            self.connection, theirs = multiprocessing.Pipe()
            self.place, self.job = place, None
            self.process = threading.Thread(
                target=local._work, args=(theirs, store, place, workers)
            )
            self.process.start()

        def stop(self):
            self.connection.close()
            self.process.join()

    monkeypatch.setattr(Store, "claim", claim)
    monkeypatch.setattr(local, "_Worker", Thread)
    monkeypatch.setattr(local.signal, "signal", lambda *_: None)  # for a process of one's own
    monkeypatch.setattr(local.torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: 0)
    experiment = planned("nearest_mean", "digits")
    report = local.run_all([experiment], Store(tmp_path / "s.sqlite"), workers=1)
    assert report.done == (experiment.key,)
    assert waits == [False, True]
