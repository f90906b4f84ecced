"""Recorded steps. There is no GPU here: playing one runs it again, on the numbers drawn for it."""

import numpy as np
import pytest
import torch

from pecil.methods import METHODS, recording
from pecil.methods.recording import Chance, Places, Recorder

CPU = torch.device("cpu")
TRAINED = [name for name, method in METHODS.items() if method.by_task]


class Rerun:
    """Stands for a recording: what a step draws, it finds in the places made at first."""

    made = 0

    def __init__(self, step, inputs, chance):
        Rerun.made += 1
        self.step, self.chance, self.fresh = step, chance, True
        self.inputs = [values.clone() for values in inputs]
        self.places = Places(CPU)
        self.places.there = self.places.here
        with chance.recorded(self.places):
            step(*self.inputs)  # a graph would wait until it is played

    def prepare(self, *inputs):
        self.fresh = False
        for mine, values in zip(self.inputs, inputs, strict=True):
            mine.copy_(values)
        self.places.draw()

    def play(self):
        if not self.fresh:
            with self.chance.recorded(_Found(self.places)):
                self.step(*self.inputs)


class _Found:
    def __init__(self, places):
        self.found = iter([here for _, here in places.draws])

    def add(self, draw):
        return next(self.found)


@pytest.mark.parametrize("shape", [(6,), (16, 16, 3)])
@pytest.mark.parametrize("name", TRAINED)
def test_a_step_that_is_played_is_the_step(monkeypatch, name, shape):
    monkeypatch.setattr(recording, "Recording", Rerun)
    monkeypatch.setattr(Rerun, "made", 0)
    method = METHODS[name]
    settings = {"batch_size": 4, "device": "cpu", "schedule": "linear", "seed": 3}
    settings |= {"buffer": 9} if method.buffer else {}
    settings |= {"width": 2, "augment": True, "flip": True} if len(shape) == 3 else {}
    settings |= {"vae_gc": {"importance_samples": 3}, "bic": {"bias_epochs": 5}}.get(name, {})
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (46, *shape), np.uint8) if len(shape) == 3 else rng.random((46, 6))
    x, y = x if len(shape) == 3 else x.astype(np.float32), np.arange(46) % 2
    learners = [method.learner(6, shape, **settings) for _ in range(2)]
    learners[0].recorder.records = True
    for learner in learners:
        for task in range(1 if method.joint else 3):
            learner.begin_task({2 * task: 23, 2 * task + 1: 23})
            learner.learn(x, y + 2 * task)
            learner.end_task()
    assert Rerun.made
    played, ran = (learner.scores(x) for learner in learners)
    np.testing.assert_array_equal(played, ran)


def test_what_is_drawn_has_a_place_of_its_own_that_is_filled_anew():
    chance, generator = Chance(CPU), torch.Generator().manual_seed(0)
    places, same = Places(CPU), torch.Generator().manual_seed(0)
    with chance.recorded(places):
        first = chance(lambda: torch.randint(100, (3,), generator=generator))
        second = chance(lambda: torch.rand(2, 2, generator=generator))
    for again in range(3):
        if again:
            places.draw()
        places.send()
        torch.testing.assert_close(first, torch.randint(100, (3,), generator=same))
        torch.testing.assert_close(second, torch.rand(2, 2, generator=same))


def test_a_step_draws_no_more_than_there_is_room_for():
    with pytest.raises(ValueError, match="may draw 1048576 bytes, but it draws 4000000"):
        Places(CPU).add(lambda: torch.zeros(1_000_000))


def test_few_recordings_are_kept_and_none_after_all_changed(monkeypatch):
    monkeypatch.setattr(recording, "Recording", Rerun)
    recorder, seen = Recorder(Chance(CPU)), []
    recorder.records = True
    for n in (1, 2, 3, 4, 5, 6, 1):
        for _ in range(2):
            recorder(n, lambda values: seen.append(len(values)), torch.zeros(n))
    assert seen == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 1, 1]
    assert list(recorder.recorded) == [4, 5, 6, 1]
    recorder.forget()
    assert not recorder.recorded and not recorder.rehearsed


ASIDE = {
    *("steps", "expected", "came", "extra", "buffer.seen"),  # counted, step by step, by the CPU
    *("chance", "recorder", "buffer.chance"),
    "way",  # of SI: a step leaves it to itself
}


class Watching(Recorder):
    """Requires that a step that is played finds what it found when it was recorded."""

    def __init__(self, learner):
        super().__init__(learner.chance)
        self.learner, self.records, self.played = learner, True, 0
        self.found = {}

    def __call__(self, key, step, *inputs):
        cells = [cell.cell_contents for cell in getattr(step, "__closure__", None) or ()]
        now = dict(things(vars(self.learner))) | dict(things(cells, "closure"))
        if key in self.recorded:
            then, self.played = self.found[key], self.played + 1
            gone = [name for name, thing in then.items() if not same(thing, now.get(name))]
            came = [name for name in now.keys() - then.keys() if "." not in name]
            assert not gone + came, f"other things than were recorded: {sorted(gone + came)}"
        elif key in self.rehearsed:
            self.found[key] = now
        super().__call__(key, step, *inputs)


def things(value, name=""):
    """Yield all that a step may find, with its name: tensors, modes of networks, plain values."""
    if isinstance(value, torch.nn.Module):
        parts = dict(value.named_parameters()) | dict(value.named_buffers())
        modes = {f"{part}.training": module.training for part, module in value.named_modules()}
        slopes = {f"{part}.slopes": p.requires_grad for part, p in value.named_parameters()}
        inner = parts | modes | slopes
    elif isinstance(value, torch.optim.Optimizer):
        inner = dict(enumerate(value.state.values()))
    elif isinstance(value, dict):
        inner = value
    elif isinstance(value, list | tuple):
        inner = dict(enumerate(value))
    elif type(value).__module__.startswith("pecil") and hasattr(value, "__dict__"):
        inner = vars(value)
    else:
        yield name, value
        return
    for part, thing in inner.items():
        path = f"{name}.{part}" if name else str(part)
        if path not in ASIDE:
            yield from things(thing, path)


def same(one, other):
    """Tell whether a recording that has one thing in it does as if it had the other."""
    return one is other or (isinstance(one, int | float | str) and one == other)


def played(monkeypatch, name):
    """Teach a learner three tasks; return how many steps were played and found what they need."""
    monkeypatch.setattr(recording, "Recording", Rerun)
    method = METHODS[name]
    settings = {"batch_size": 4, "device": "cpu", "schedule": "linear", "hidden": (4,)}
    settings |= {"buffer": 9} if method.buffer else {}
    settings |= {"bias_epochs": 3} if name == "bic" else {}
    learner = method.learner(6, (6,), **settings)
    learner.recorder = Watching(learner)
    x, y = np.random.default_rng(0).random((30, 6), np.float32), np.arange(30) % 2
    for task in range(1 if method.joint else 3):
        learner.begin_task({2 * task: 15, 2 * task + 1: 15})
        learner.learn(x, y + 2 * task)
        learner.end_task()
    return learner.recorder.played


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_that_is_played_finds_what_it_found_when_it_was_recorded(monkeypatch, name):
    assert played(monkeypatch, name) > 3


@pytest.mark.parametrize("name", [name for name in TRAINED if not METHODS[name].learner.lasting])
def test_a_step_that_does_not_last_would_not_find_it_in_the_next_task(monkeypatch, name):
    monkeypatch.setattr(METHODS[name].learner, "lasting", True)
    with pytest.raises(AssertionError, match="other things than were recorded"):
        played(monkeypatch, name)
