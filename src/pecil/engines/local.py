"""The engine of one machine: a pool of processes, one for each core or for each place on a GPU.

Workers are started afresh (spawned, not forked: a GPU outlives no fork), take one experiment
after the other and write the results into the store themselves, so that what is finished
stays finished whatever becomes of the sweep. Two sweeps into one store share the work: an
experiment that another process is at goes to the end of the queue, where a worker waits for
that process and runs it only if there is still no result.
"""

import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from pecil.bench.experiment import Experiment, Progress, run
from pecil.bench.store import Store
from pecil.engines import Failure, Report

PER_GPU = 12  # workers that share a GPU, unless told otherwise
MPS = "nvidia-cuda-mps-control"
PATIENCE = 30  # seconds that the service may take to end
START = "spawn"


def run_all(
    experiments: Iterable[Experiment],
    store: Store,
    *,
    workers: int | None = None,
    retries: int = 1,
    within: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run experiments that have no result yet, in processes of this machine.

    A script that calls this needs ``if __name__ == "__main__":`` around its commands, because
    every worker imports the script: methods that it adds to `pecil.methods.METHODS` are known
    to the workers, too.

    Parameters
    ----------
    experiments : iterable of Experiment
        What to run; the first ones begin first.
    store : Store
        Where the results go, and where those that are there already are found.
    workers : int, optional
        How many processes at most; by default one for each core, with a GPU no more than twelve
        for each. They share the cores and the GPUs evenly, and there are no more of them than
        experiments.
    retries : int
        How often to try again an experiment of which a worker died.
    within : float, optional
        Seconds after which to end, dropping what is still under way.
    progress : callable, optional
        Called with the number of experiments that are over and the number in all.

    Returns
    -------
    Report
    """
    if workers is not None and workers < 1:
        raise ValueError(f"expected one worker or more, got {workers}")
    jobs = {experiment.key: _Job(experiment) for experiment in experiments}
    done = [key for key in jobs if store.get(key) is not None]
    waiting = deque(job for key, job in jobs.items() if key not in set(done))
    pool = _Pool(store.path, min(workers or default_workers(), len(waiting)), retries, waiting)
    failed: list[Failure] = []
    end = math.inf if within is None else time.monotonic() + within
    with shared_gpus(), closing(pool):
        while True:
            if progress is not None:
                progress(len(done) + len(failed), len(jobs))
            if time.monotonic() >= end or not pool.fill():
                return Report(tuple(done), tuple(failed))
            for over in pool.wait(end):
                if isinstance(over, Failure):
                    failed.append(over)
                else:
                    done.append(over)


@contextmanager
def shared_gpus() -> Iterator[None]:
    """Let processes that are started meanwhile compute on a GPU at the same time.

    Without NVIDIA's multi-process service, or where it may not be started, they take turns.
    """
    control = shutil.which(MPS)
    if not torch.cuda.device_count() or control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="pecil-") as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        os.environ.update(dict.fromkeys(names, folder))
        started = subprocess.run([control, "-d"], capture_output=True).returncode == 0
        if not started:
            _remove(names)
        try:
            yield
        finally:
            if started:
                with suppress(subprocess.TimeoutExpired):
                    subprocess.run(
                        [control], input=b"quit\n", capture_output=True, timeout=PATIENCE
                    )
                _remove(names)


def _remove(names: Iterable[str]) -> None:
    for name in names:
        del os.environ[name]


def default_workers() -> int:
    """Return how many workers there are if nobody says: one a core, at most twelve a GPU.

    >>> default_workers() > 0
    True
    """
    gpus = torch.cuda.device_count()
    return min(_cores(), PER_GPU * gpus) if gpus else _cores()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass
class _Job:
    """An experiment on its way through the pool."""

    experiment: Experiment
    deaths: int = 0
    """Workers that died of it."""
    elsewhere: bool = False
    """Whether another process was at it when a worker looked last."""


class _Pool:
    """Workers, what they are at, and what waits."""

    def __init__(self, store: Path, size: int, retries: int, waiting: deque[_Job]) -> None:
        self.store, self.size, self.retries, self.waiting = store, size, retries, waiting
        self.workers: list[_Worker] = []

    def fill(self) -> bool:
        """Give work to all who have none; say whether any is left."""
        for worker in self.workers:
            if worker.job is None and self.waiting:
                worker.give(self.waiting.popleft())
        while self.waiting and len(self.workers) < self.size:
            taken = {worker.place for worker in self.workers}
            place = next(k for k in range(self.size) if k not in taken)
            worker = _Worker(self.store, place, self.size)
            self.workers.append(worker)
            worker.give(self.waiting.popleft())
        return any(worker.job for worker in self.workers)

    def wait(self, end: float) -> list[str | Failure]:
        """Wait for a worker or the end; return the keys of what is done, and failures."""
        left = None if math.isinf(end) else max(0.0, end - time.monotonic())
        ready = wait([worker.connection for worker in self.workers if worker.job], left)
        found = [self._heard(worker) for worker in self.workers[:] if worker.connection in ready]
        return [over for over in found if over is not None]

    def _heard(self, worker: "_Worker") -> str | Failure | None:
        """Take what a worker has to say; None if its experiment is not over yet."""
        job, worker.job = worker.job, None
        assert job is not None
        try:
            outcome, text = worker.connection.recv()
        except (EOFError, OSError):
            return self._died(worker, job)
        if outcome == "elsewhere":
            job.elsewhere = True
            self.waiting.append(job)
            return None
        return job.experiment.key if outcome == "done" else Failure(job.experiment, text)

    def _died(self, worker: "_Worker", job: _Job) -> Failure | None:
        """Bury a worker; queue its experiment again, unless that was tried often enough."""
        self.workers.remove(worker)
        worker.stop()
        job.deaths += 1
        if job.deaths <= self.retries:
            self.waiting.append(job)
            return None
        code = worker.process.exitcode
        return Failure(job.experiment, f"{job.deaths} workers died of it, exit code {code}")

    def close(self) -> None:
        """End all workers, whatever they are at."""
        for worker in self.workers:
            worker.stop()


class _Worker:
    """A process, seen from outside."""

    def __init__(self, store: Path, place: int, workers: int) -> None:
        context: Any = multiprocessing.get_context(START)
        self.connection, theirs = context.Pipe()
        self.place = place
        self.job: _Job | None = None
        self.process = context.Process(
            target=_work, args=(theirs, store, place, workers), daemon=True
        )
        self.process.start()
        theirs.close()

    def give(self, job: _Job) -> None:
        """Hand over an experiment."""
        self.job = job
        with suppress(OSError):  # it died meanwhile: that will be heard
            self.connection.send((job.experiment, job.elsewhere))

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _gpu(place: int) -> str | None:
    """Return the name of the GPU at which a worker has its place."""
    gpus = torch.cuda.device_count()
    if not gpus:
        return None
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    return names.split(",")[place % gpus]


def _work(connection: Connection, path: Path, place: int, workers: int) -> None:
    """Run what comes until nobody is there any more to send it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sharing = None
    if (gpu := _gpu(place)) is not None:
        sharing = len(range(place % torch.cuda.device_count(), workers, torch.cuda.device_count()))
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    torch.set_num_threads(max(1, _cores() // workers))
    store = Store(path)
    with suppress(EOFError, OSError):
        while True:
            experiment, patient = connection.recv()
            connection.send(_outcome(experiment, store, patient, sharing))


def _end_with_parent() -> None:
    """End this process, whatever it is at, as soon as the one who started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _outcome(
    experiment: Experiment, store: Store, patient: bool, sharing: int | None
) -> tuple[str, str]:
    """Run an experiment unless it has a result or, for the impatient, is run elsewhere."""
    try:
        with store.claim(experiment.key, wait=patient) as ours:
            if not ours:
                return "elsewhere", ""
            if store.get(experiment.key) is None:
                store.add(run(experiment, sharing=sharing))
    except Exception:
        return "failed", traceback.format_exc()
    return "done", ""
