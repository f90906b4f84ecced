"""Every method passes the checks, and every check can fail."""

import re

import numpy as np
import pytest
import torch

from pecil import checks
from pecil.checks import CheckFailed, check_learner, yield_checks
from pecil.methods import METHODS, Method, NearestMean

SMALL = {
    "whitened_pec": {"teacher": "relu", "dim": 40},
    "pec": {"teacher_width": 50},
    "randumb": {"dim": 40},
    "finetuning": {"lr": 0.01},
    "joint": {"lr": 0.01},
}


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, id=f"{name}-{check.__name__}")
        for name, method in METHODS.items()
        for check in yield_checks(method)
    ],
)
def test_every_method_conforms(name, check):
    check(METHODS[name], **SMALL.get(name, {}))


class Replaying(NearestMean):
    """A nearest mean that keeps the last samples (Nobody 2024).

    >>> Replaying(2, (3,), buffer=5).n_buffered
    0
    """

    def __init__(self, *args, buffer=100, **given):
        super().__init__(*args, **given)
        self.capacity, self.kept = buffer, []

    @property
    def n_buffered(self):
        return len(self.kept)

    def learn(self, x, y):
        super().learn(x, y)
        self.kept = [*self.kept, *x][-self.capacity :]


def a_method(learner, **capabilities):
    return Method("mine", "Mine", "Me (2024).", "A test.", learner, (), **capabilities)


def failing(check, method, **settings):
    """Return what a check says, which must be among those for the method."""
    assert check in yield_checks(method)
    with pytest.raises(CheckFailed) as raised:
        check(method, **settings)
    return str(raised.value)


def test_a_method_with_a_buffer_is_asked_for_its_capacity():
    method = a_method(Replaying, buffer=True)
    check_learner(method)
    assert checks.samples_are_not_kept not in yield_checks(method)
    secret = failing(checks.samples_are_not_kept, a_method(Replaying), buffer=10_000)
    assert "without a buffer" in secret


class ChangesInputs(NearestMean):
    def learn(self, x, y):
        super().learn(x, y)
        x -= 1


class ChangesLabels(NearestMean):
    def learn(self, x, y):
        super().learn(x, y)
        y[:] = 0


class ChangesWhatItScores(NearestMean):
    def scores(self, x):
        scores = super().scores(x)
        x[:] = 0
        return scores


class TooFewColumns(NearestMean):
    def scores(self, x):
        return super().scores(x)[:, :-1]


class NotFinite(NearestMean):
    def scores(self, x):
        return super().scores(x) * np.nan


class Unsteady(NearestMean):
    calls = 0

    def scores(self, x):
        self.calls += 1
        return super().scores(x) * self.calls


class LearnsFromScoring(NearestMean):
    asked = False

    def scores(self, x):
        self.asked = True
        return super().scores(x)

    def learn(self, x, y):
        super().learn(x + self.asked, y)


class NormalisesBatches(NearestMean):
    def scores(self, x):
        return super().scores(x - x.mean(0))


class WantsMany(NearestMean):
    def learn(self, x, y):
        if len(x) > 1:
            super().learn(x, y)


class GloballyRandom(NearestMean):
    def learn(self, x, y):
        super().learn(x + torch.randn(x.shape).numpy(), y)


class GloballyRandomInNumpy(NearestMean):
    def learn(self, x, y):
        super().learn(x + np.random.normal(size=x.shape), y)


class ForgetsInPickles(NearestMean):
    def __getstate__(self):
        return vars(self) | {"summary": self._empty(64)}


class LosesItsStep(NearestMean):
    step = 0

    def learn(self, x, y):
        self.step += 1
        super().learn(x * self.step, y)

    def __getstate__(self):
        return vars(self) | {"step": 0}


class GuessesUnseen(NearestMean):
    def scores(self, x):
        return np.nan_to_num(super().scores(x), neginf=0.0)


class Guesses(NearestMean):
    def scores(self, x):
        return np.where(np.isneginf(super().scores(x)), -np.inf, np.arange(self.n_classes))


class OneTask(NearestMean):
    def end_task(self):
        self.learn = lambda x, y: None


class WeighsBatches(NearestMean):
    def learn(self, x, y):
        super().learn(x[:5], y[:5])


class KeepsSamples(NearestMean):
    kept = ()

    def learn(self, x, y):
        super().learn(x, y)
        self.kept = [*self.kept, x]


class KeepsTwice(Replaying):
    def learn(self, x, y):
        super().learn(x, y)
        self.kept = [*self.kept, *self.kept]


class KeepsNothing(Replaying):
    def learn(self, x, y):
        NearestMean.learn(self, x, y)


@pytest.mark.parametrize(
    ("learner", "check", "message"),
    [
        (ChangesInputs, "inputs_stay_unchanged", "x to be left as it was, got a change"),
        (ChangesLabels, "inputs_stay_unchanged", "y to be left as it was, got a change"),
        (ChangesWhatItScores, "inputs_stay_unchanged", "x to be left as it was, got a change"),
        (TooFewColumns, "scores_have_their_shape", r"shape \(7, 5\), got \(7, 4\)"),
        (NotFinite, "scores_have_their_shape", "finite scores"),
        (Unsteady, "scoring_changes_nothing", "same scores when asked twice"),
        (LearnsFromScoring, "scoring_changes_nothing", "whether scores were asked for or not"),
        (NormalisesBatches, "scores_do_not_depend_on_the_batch", "in batches of 1 as in one"),
        (GloballyRandom, "the_same_seed_gives_the_same_scores", "global generators"),
        (GloballyRandomInNumpy, "the_same_seed_gives_the_same_scores", "global generators"),
        (ForgetsInPickles, "pickling_keeps_everything", "same scores after pickling"),
        (LosesItsStep, "pickling_keeps_everything", "same learning after pickling"),
        (GuessesUnseen, "a_class_never_seen_is_never_predicted", "-inf for classes .* got 0.0"),
        (Guesses, "easy_data_is_learned", "above 0.5 on easy data, got 0.25"),
        (OneTask, "tasks_may_follow_one_another", r"classes 0 to 1 .* got \[0\]"),
        (KeepsSamples, "samples_are_not_kept", "without a buffer to grow by at most 10%"),
    ],
)
def test_what_is_wrong_is_found(learner, check, message):
    assert re.search(message, failing(getattr(checks, check), a_method(learner)))


def test_a_learner_that_needs_large_batches_is_found():
    said = failing(checks.a_batch_of_one_works, a_method(WantsMany))
    assert "the classes 0 to 3 to be known from single samples, got []" in said


def test_portions_that_matter_are_found():
    said = failing(checks.portions_do_not_matter, a_method(WeighsBatches, independent=True))
    assert "the same scores from batches of 7" in said
    assert checks.portions_do_not_matter not in yield_checks(a_method(WeighsBatches))


@pytest.mark.parametrize(("learner", "found"), [(KeepsTwice, "got 2"), (KeepsNothing, "got 0")])
def test_a_buffer_out_of_bounds_is_found(learner, found):
    said = failing(checks.the_buffer_stays_within_its_capacity, a_method(learner, buffer=True))
    assert f"1 to 13 samples in the buffer, {found}" in said


def test_one_task_is_all_that_joint_training_is_asked_for():
    assert checks.tasks_may_follow_one_another not in yield_checks(a_method(OneTask, joint=True))
    check_learner(a_method(Documented, joint=True))


class Documented(OneTask):
    """As in Somebody (2024).

    >>> 1 + 1
    2
    """


def documented(text):
    return type("Documented", (NearestMean,), {"__doc__": text, "__module__": "nowhere"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "a reference and its year, got none"),
        ("A method.\n\n>>> 1 + 1\n2\n", "a reference and its year, got none"),
        ("A method (Me 2024).", "with an example, got none"),
        ("A method (Me 2024).\n\n>>> 1 + 1\n3\n", "that runs, got .*Expected:\n    3\nGot:\n    2"),
    ],
)
def test_poor_docstrings_are_found(text, message):
    check = checks.the_docstring_has_a_reference_and_an_example
    assert re.search(message, failing(check, a_method(documented(text))), re.DOTALL)


def test_checks_leave_the_global_generators_alone():
    torch.manual_seed(3)
    np.random.seed(3)
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    checks.the_same_seed_gives_the_same_scores(METHODS["finetuning"])
    assert torch.equal(torch.get_rng_state(), torch_before)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_before)
