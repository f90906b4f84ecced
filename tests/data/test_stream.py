import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pecil.data import Dataset, load, stream

LABELS = np.array([2, 0, 1, 0, 2, 2, 1, 0, 3, 3, 0, 1])


def numbered(labels=LABELS):
    """Return a dataset in which a sample's only feature is its position."""
    labels = np.asarray(labels)
    return Dataset("numbered", np.arange(len(labels))[:, None], labels)


def positions(tasks):
    return [task.x[:, 0].tolist() for task in tasks]


def test_tasks_hold_their_classes_and_every_sample_once():
    tasks = list(stream(numbered(), "2/2"))
    assert [task.index for task in tasks] == [0, 1]
    assert [task.classes for task in tasks] == [(0, 1), (2, 3)]
    assert sorted(positions(tasks)[0]) == np.flatnonzero(LABELS <= 1).tolist()
    assert sorted(positions(tasks)[1]) == np.flatnonzero(LABELS >= 2).tolist()
    for task in tasks:
        assert np.array_equal(task.y, LABELS[task.x[:, 0]])


def test_without_shuffling_samples_come_in_file_order():
    assert positions(stream(numbered(), "2/2", shuffle=False)) == [
        [1, 2, 3, 6, 7, 10, 11],
        [0, 4, 5, 8, 9],
    ]


def test_the_seed_decides_the_order():
    data = load("digits")
    orders = [positions_of_first_task(data, seed) for seed in (0, 0, 1)]
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    assert np.array_equal(np.sort(orders[0]), np.sort(orders[2]))
    assert not np.array_equal(orders[0], np.sort(orders[0]))


def positions_of_first_task(data, seed):
    return next(iter(stream(data, "5/2", seed=seed))).passes[0]


def test_a_stream_can_be_read_twice():
    tasks = stream(numbered(), "2/2", seed=3, epochs=2)
    assert positions(tasks) == positions(tasks)


def test_shuffling_mixes_the_classes_of_a_task():
    labels = next(iter(stream(load("digits"), "joint"))).y
    changes = np.count_nonzero(np.diff(labels))
    assert changes > 0.85 * len(labels)  # 0.9 expected with ten classes


def test_every_order_of_a_task_is_equally_likely():
    data = numbered([0, 0, 1])
    seen = {}
    for seed in range(1200):
        (order,) = positions(stream(data, "joint", seed=seed))
        seen[tuple(order)] = seen.get(tuple(order), 0) + 1
    assert len(seen) == 6
    assert min(seen.values()) > 150 and max(seen.values()) < 250  # 200 expected, deviation 13


@settings(max_examples=50, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    seed=st.integers(0, 2**63),
    data=st.data(),
)
def test_a_class_keeps_its_own_order_in_every_split(labels, seed, data):
    classes = sorted(set(labels))
    n = len(classes)
    splits = [f"{n // c}/{c}" for c in range(1, n + 1) if n % c == 0]
    options = dict(seed=seed, epochs=data.draw(st.integers(1, 3)))
    one, other = (
        [
            sample
            for task in stream(
                numbered(labels),
                data.draw(st.sampled_from(splits)),
                class_order=data.draw(st.permutations(classes)),
                **options,
            )
            for sample in task.x[:, 0].tolist()
        ]
        for _ in range(2)
    )
    assert len(one) == len(other) == len(labels) * options["epochs"]
    for c in classes:
        assert [i for i in one if labels[i] == c] == [i for i in other if labels[i] == c]


def test_batches_keep_the_last_partial_one_and_follow_x():
    task = next(iter(stream(numbered(), "joint", batch_size=5)))
    batches = list(task.batches())
    assert [len(y) for _, y in batches] == [5, 5, 2]
    assert np.array_equal(np.concatenate([x for x, _ in batches]), task.x)
    assert np.array_equal(np.concatenate([y for _, y in batches]), task.y)


def test_epochs_are_passes_within_the_task_each_in_its_own_order():
    tasks = stream(load("digits"), "2/5", epochs=3, batch_size=100)
    for task in tasks:
        first, second, third = task.passes
        assert np.array_equal(np.sort(first), np.sort(second))
        assert not np.array_equal(first, second) and not np.array_equal(second, third)
        assert np.array_equal(task.y, tasks.dataset.train_y[np.concatenate(task.passes)])
        sizes = [len(y) for _, y in task.batches()]
        assert sum(sizes) == 3 * len(first)
        assert sizes.count(len(first) % 100) == 3  # a partial batch ends every pass


def test_counts_are_the_samples_of_the_stream():
    assert stream(numbered(), "joint").counts == {0: 4, 1: 3, 2: 3, 3: 2}
    tasks = stream(numbered(), "4/1", epochs=2)
    assert tasks.counts == {task.classes[0]: len(task.y) for task in tasks}


@pytest.mark.parametrize(("split", "n"), [("10/1", 10), ("5/2", 5), ("1/10", 1), ("joint", 1)])
def test_length_is_the_number_of_tasks(split, n):
    tasks = stream(load("digits"), split)
    assert len(tasks) == len(list(tasks)) == n


@pytest.mark.parametrize("split", ["10/2", "3/3", "0/10", "10", "ten/1", "", "1/1/10", "-5/-2"])
def test_a_split_that_does_not_fit_names_those_that_do(split):
    with pytest.raises(ValueError, match="10 classes.* 10/1, 5/2, 2/5, 1/10 and joint"):
        stream(load("digits"), split)


def test_class_order_can_be_given():
    order = [3, 1, 0, 2]
    tasks = stream(numbered(), "2/2", class_order=order)
    assert tasks.class_order == (3, 1, 0, 2)
    assert [task.classes for task in tasks] == [(3, 1), (0, 2)]
    assert stream(numbered(), "4/1", class_order=np.array(order)).class_order == (3, 1, 0, 2)


def test_class_order_can_be_drawn_from_the_seed():
    digits = load("digits")
    orders = [stream(digits, seed=s, class_order="random").class_order for s in range(5)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len(set(orders)) == 5
    assert stream(digits, seed=4, class_order="random").class_order == orders[4]


@pytest.mark.parametrize(
    "order", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], [0, 1, 2, 3, 3], "sorted"]
)
def test_class_order_must_be_a_permutation(order):
    with pytest.raises(ValueError, match="class_order: expected"):
        stream(numbered(), "4/1", class_order=order)


def test_labels_may_be_text():
    tasks = stream(numbered(["b", "a", "b", "c"]), "3/1", class_order=["c", "a", "b"])
    assert [task.classes for task in tasks] == [("c",), ("a",), ("b",)]
    assert tasks.counts == {"c": 1, "a": 1, "b": 2}


@pytest.mark.parametrize(
    "bad",
    [
        {"seed": -1},
        {"seed": None},
        {"seed": 0.5},
        {"batch_size": 0},
        {"batch_size": 2.0},
        {"epochs": 0},
        {"epochs": True},
    ],
)
def test_numbers_out_of_range_are_named(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}: expected a whole number"):
        stream(numbered(), "4/1", **bad)


def test_the_dataset_is_neither_changed_nor_copied():
    data = numbered()
    before = data.train_x.copy(), data.train_y.copy()
    tasks = stream(data, "2/2", seed=1)
    task = next(iter(tasks))
    task.x[:] = -1
    assert np.array_equal(data.train_x, before[0]) and np.array_equal(data.train_y, before[1])
    assert tasks.dataset is data


def test_a_stream_needs_labels():
    with pytest.raises(ValueError, match="own: a stream of tasks needs labels, found none"):
        stream(Dataset("own", np.ones((4, 2)), None))
