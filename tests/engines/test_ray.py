"""A real cluster of Ray on this machine: a head without cores, and two nodes with one each."""

import os
import secrets
import time
from collections import Counter

import numpy as np
import pytest

from pecil import WhitenedPEC
from pecil.bench.experiment import Experiment, run
from pecil.bench.store import Store
from pecil.engines import ray as engine


@pytest.fixture(scope="module")
def cluster():
    """Start a cluster that only this process may use: Ray reads the token when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
        import ray
        from ray.cluster_utils import Cluster

        small = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        for _ in range(2):
            cluster.add_node(num_cpus=1, **small)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store.sqlite")


def experiments(n):
    return [Experiment("whitened_pec", "digits", seed=k, settings={"dim": 20}) for k in range(n)]


def dataset_of(rows, blocks):
    import ray

    return ray.data.from_items(rows, override_num_blocks=blocks)


def observed(tmp_path, before=lambda experiment: None):
    """Return a ``run`` that notes when it starts and ends, and how to read the notes."""
    notes = tmp_path / "notes"
    notes.mkdir()

    def noted(experiment, sharing=None):
        import ray

        from pecil.bench.experiment import run

        name = f"{experiment.seed} {ray.get_runtime_context().get_node_id()} {os.getpid()}"
        (notes / f"start {name}").touch()
        before(experiment)
        result = run(experiment, device="cpu", sharing=sharing)
        (notes / f"end {name}").touch()
        return result

    def read():
        """Return (event, seed, node) of every note."""
        found = [path.name.split() for path in notes.iterdir()]
        return [(event, int(seed), node) for event, seed, node, _ in found]

    return noted, read


def test_a_poisoned_experiment_is_reported_and_the_others_go_on(
    cluster, store, tmp_path, monkeypatch
):
    plan = experiments(5)
    raises, kills = plan[1], plan[2]

    def before(experiment):
        if experiment.seed == raises.seed:
            raise ValueError("poisoned")
        if experiment.seed == kills.seed:
            os._exit(1)

    noted, read = observed(tmp_path, before)
    monkeypatch.setattr(engine, "run", noted)
    steps = []
    report = engine.run_all(plan, store, workers=2, progress=lambda *step: steps.append(step))
    reasons = {failure.experiment.key: failure.reason for failure in report.failed}
    assert reasons.keys() == {raises.key, kills.key}
    assert "poisoned" in reasons[raises.key] and "died" in reasons[kills.key]
    assert sorted(report.done) == sorted(plan[k].key for k in (0, 3, 4))
    starts = Counter(seed for event, seed, _ in read() if event == "start")
    assert starts == {0: 1, 1: 1, 2: 2, 3: 1, 4: 1}
    assert steps[0][1] == 5 and steps[-1] == (5, 5)
    accuracies = {result.experiment.key: result.accuracy for result in store.results()}
    assert accuracies == {key: run_here(key, plan) for key in report.done}


def test_what_was_not_begun_when_the_time_was_over_is_not_done(cluster, store):
    report = engine.run_all(experiments(2), store, within=0)
    assert (report.done, report.failed, len(store)) == ((), (), 0)


def run_here(key, plan):
    (experiment,) = (one for one in plan if one.key == key)
    return run(experiment, device="cpu").accuracy


def test_whitened_pec_learns_an_array_as_in_one_process(cluster, clusters):
    x, y = clusters(labels=(("a", 1), "b", 3), n=200, shape=(3, 6, 6))
    one, other = (
        WhitenedPEC(dim=60, device="cpu", random_state=np.random.RandomState(0)) for _ in range(2)
    )
    fitted = engine.fit(one, x, y, workers=2, batch_size=150)
    assert not hasattr(one, "classes_") and fitted.random_state is one.random_state
    same_up_to_rounding(fitted, other.fit(x, y), x)


def same_up_to_rounding(one, other, x):
    assert one.classes_.tolist() == other.classes_.tolist()
    assert one.samples_seen_ == other.samples_seen_
    assert one.seed_ == other.seed_ and one.channels == other.channels
    slots = [one._slots[label] for label in other._labels]
    np.testing.assert_allclose(one._scatter.means[slots], other._scatter.means, atol=1e-6)
    scale = float(other._scatter.matrix.abs().max())
    np.testing.assert_allclose(
        one._scatter.matrix, other._scatter.matrix, rtol=0, atol=1e-5 * scale
    )
    np.testing.assert_allclose(one.errors(x), other.errors(x), rtol=1e-3)
    assert one.calibrate().threshold_ > 0


def test_pec_learns_a_dataset_as_in_one_process_to_the_last_bit(cluster, clusters, small, state):
    x, y = clusters(labels=("e", "a", "d", "c", "b"), n=40)
    rows = [{"features": one, "kind": label} for one, label in zip(x, y, strict=True)]
    model = small(random_state=3)
    apart = engine.fit(model, dataset_of(rows, 3), columns=("features", "kind"), workers=3)
    together = model.fit(x, y)
    assert apart._labels == together._labels and state(apart) == state(together)
    np.testing.assert_array_equal(apart.errors(x), together.errors(x))


def test_a_worker_that_dies_in_the_middle_of_a_model_is_replaced(cluster, clusters, tmp_path):
    """The teacher ends its process, once, on the samples of a batch."""
    died = tmp_path / "died"

    def teacher(x):
        if len(x) > 2 and not died.exists():  # not the two that tell the dimension
            died.touch()
            os._exit(1)
        return x.flatten(1)

    x, y = clusters(labels=("a", "b"), n=100, shape=(12,))
    fitted = engine.fit(WhitenedPEC(teacher=teacher, device="cpu"), x, y, workers=2, batch_size=50)
    assert died.exists()
    same_up_to_rounding(fitted, WhitenedPEC(teacher=teacher, device="cpu").fit(x, y), x)


def test_what_a_worker_refuses_is_said_here(cluster, small):
    x = np.ones((4, 5), np.float32)
    x[2, 2] = np.nan
    rows = [{"x": one, "y": k % 2} for k, one in enumerate(x)]
    with pytest.raises(ValueError, match="NaN"):
        engine.fit(small(), dataset_of(rows, 1))
    with pytest.raises(ValueError, match="no column 'label'; it has x, y"):
        engine.fit(small(), dataset_of(rows, 1), columns=("x", "label"))


def test_what_cannot_be_trained_apart_is_refused(small):
    with pytest.raises(ValueError, match="PEC or a WhitenedPEC"):
        engine.fit("pec", [[1.0]], [0])
    with pytest.raises(ValueError, match="equal_budgets"):
        engine.fit(small(equal_budgets=True), [[1.0]], [0])


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 100])
def test_shares_keep_the_order_and_are_about_equal(workers):
    counts = dict(zip("hgfedcba", [10, 10, 30, 5, 5, 10, 10, 20], strict=True))
    shares = list(engine._shares(counts, workers).values())
    assert shares == sorted(shares) and set(shares) == set(range(len(set(shares))))
    sizes = Counter()
    for n, share in zip(counts.values(), shares, strict=True):
        sizes[share] += n
    assert len(sizes) <= workers and max(sizes.values()) <= 100 / workers + 30


def test_a_node_dies_in_the_middle(cluster, store, tmp_path, monkeypatch):
    """The last of the tests: it leaves a cluster of one node."""
    victim = min(cluster.worker_nodes, key=lambda node: node.node_id)
    doomed, used, stuck = victim.node_id, tmp_path / "used", tmp_path / "stuck"

    def before(experiment):
        """Finish one experiment on the doomed node, get stuck in the next; elsewhere, wait."""
        import ray

        here = ray.get_runtime_context().get_node_id() == doomed
        if here and not used.exists():
            used.touch()
        elif here:
            stuck.touch()
            time.sleep(600)
        while not (here or stuck.exists()):
            time.sleep(0.05)

    noted, read = observed(tmp_path, before)

    def progress(over, total):
        if stuck.exists() and victim in cluster.worker_nodes:
            cluster.remove_node(victim, allow_graceful=False)

    monkeypatch.setattr(engine, "run", noted)
    plan = experiments(5)
    report = engine.run_all(plan, store, progress=progress)
    assert victim not in cluster.worker_nodes
    assert not report.failed and set(report.done) == {one.key for one in plan}
    assert sorted(r.experiment.seed for r in store.results()) == list(range(5))
    ends = Counter(seed for event, seed, _ in read() if event == "end")
    assert ends == dict.fromkeys(range(5), 1)  # none twice, also of those on the dead node
    starts = Counter(seed for event, seed, _ in read() if event == "start")
    assert sorted(starts.values()) == [1] * 4 + [2]  # the one it was stuck in

    engine.run_all(plan, store)
    assert len([event for event, _, _ in read() if event == "start"]) == sum(starts.values())
