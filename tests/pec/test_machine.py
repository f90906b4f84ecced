"""Room, threads, exact products."""

import signal
import time
from threading import Event, Thread

import numpy as np
import pytest
import torch
from layers import Largest

from pecil import PEC, WhitenedPEC
from pecil.pec import machine, scatter
from pecil.pec.machine import by_threads, in_full, one_thread, uninterrupted, without_onednn


@pytest.mark.parametrize(
    ("shape", "n"), [((784,), 3000), ((3, 32, 32), 700), ((3, 84, 84), 64)], ids=str
)
@pytest.mark.parametrize("classes", [1, 4])
def test_scoring_needs_no_more_memory_than_stated(shape, n, classes, small, monkeypatch):
    """The stated 64 MiB and the samples, all sixteen times smaller."""
    assert machine.CPU_MOST * 4 == 64 * 2**20
    monkeypatch.setattr(machine, "CPU_MOST", machine.CPU_MOST // 16)
    monkeypatch.setattr(machine, "CPU_CACHED", machine.CPU_CACHED // 16)
    x = np.random.default_rng(0).integers(0, 256, (n, *shape), dtype=np.uint8)
    model = small().fit(x[:classes], list(range(classes)))
    with Largest() as largest:
        model.errors(x)
    assert 2**19 < largest.size <= 4 * 2**20


def test_each_thread_uses_one_and_the_others_come_back():
    torch.set_num_threads(3)
    try:
        told = []
        by_threads(lambda place: told.append((place, torch.get_num_threads())), 7)
        assert sorted(told) == [(place, 1) for place in range(7)]
        other = Thread(target=lambda: told.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert told[-1] == 3
        with pytest.raises(ZeroDivisionError):
            by_threads(lambda place: 1 / place, 2)
    finally:
        torch.set_num_threads(1)


def test_when_one_thread_fails_the_others_come_to_their_end():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    over = []

    def work(place):
        if place == 0:
            raise KeyError(place)
        time.sleep(0.2)
        over.append(place)

    try:
        with pytest.raises(KeyError):
            by_threads(work, 2)
        assert over == [1]
    finally:
        torch.set_num_threads(before)


def test_an_interrupt_waits_until_all_is_done():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("inside")
        done.append("outside")
    assert done == ["inside", "outside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_in_a_thread_there_are_no_interrupts_to_wait_for():
    done = []

    def work():
        with uninterrupted():
            done.append(signal.getsignal(signal.SIGINT))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


def test_small_work_is_done_in_one_thread_and_the_others_come_back():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread(small=False):
            assert torch.get_num_threads() == 3
        with pytest.raises(KeyError), one_thread():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 3
        seen = []
        for model in (PEC(teacher_width=20, output_dim=5), WhitenedPEC(dim=6)):
            model.partial_fit([[1.0, 2.0], [2.0, 1.0]], ["a", "b"])
            own = model._tensor
            model._tensor = lambda raw, own=own: seen.append(torch.get_num_threads()) or own(raw)
            model.partial_fit([[1.0, 2.0]], ["a"]).predict([[1.0, 2.0]])
            assert torch.get_num_threads() == 3
        assert seen == [1] * 4
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def coarse():
    """Let float32 products be coarse, as many programs do for the sake of speed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def allowed():
    return [matmul.fp32_precision for matmul in machine._matmuls()]


def test_products_are_kept_in_full_and_what_was_allowed_comes_back(coarse):
    before = allowed()
    assert not set(before) & set(machine.EXACT)
    with pytest.raises(KeyError), in_full, in_full:
        assert set(allowed()) <= set(machine.EXACT)
        raise KeyError
    assert allowed() == before
    assert torch.get_float32_matmul_precision() == "medium"


def test_threads_in_full_do_not_wait_for_each_other_nor_leave_too_early(coarse):
    before, inside, left = allowed(), Event(), Event()

    @in_full
    def other():
        inside.set()
        assert left.wait(timeout=60)
        told.append(allowed())

    told = []
    thread = Thread(target=other)
    with in_full:
        thread.start()
        assert inside.wait(timeout=60)
    left.set()  # the first one is out, the second still in
    thread.join()
    assert set(told[0]) <= set(machine.EXACT)
    assert allowed() == before


def test_threads_without_onednn_leave_it_as_they_found_it():
    """The first one in is the first one out; what it puts back is for the last one to do."""
    inside, left, told = Event(), Event(), []

    def other():
        with without_onednn:
            inside.set()
            assert left.wait(timeout=60)
            told.append(torch._C._get_mkldnn_enabled())

    before = torch._C._get_mkldnn_enabled()
    thread = Thread(target=other)
    with without_onednn:
        thread.start()
        assert inside.wait(timeout=60)
    left.set()
    thread.join()
    assert told == [False]
    assert torch._C._get_mkldnn_enabled() == before


def test_products_stay_as_they_are_where_nothing_coarse_is_allowed():
    before = allowed()
    with in_full:
        assert allowed() == before
    assert allowed() == before


def test_an_older_library_has_one_precision_for_all(coarse, monkeypatch):
    monkeypatch.setattr(machine, "_matmuls", lambda: (machine._AllMatmuls(),))
    with in_full:
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "medium"


def test_whitened_pec_is_the_same_whatever_the_program_allows(monkeypatch):
    """Filters, covariance, distances: a processor with bfloat16 would round all of them."""
    monkeypatch.setattr(scatter, "MANY", 8)
    monkeypatch.setattr(scatter, "BLOCK", 32)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    y = np.arange(60) % 3
    found = []
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        try:
            model = WhitenedPEC(dim=80, random_state=0).fit(x, y)
            found.append((model._scatter.matrix, torch.from_numpy(model.discriminants(x))))
        finally:
            torch.set_float32_matmul_precision("highest")
    for exact, other in zip(*found, strict=True):
        assert torch.equal(exact, other)
