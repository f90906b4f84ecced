"""The other side of benchmarks/avalanche.py: one run by avalanche-lib.

Works in an environment of its own, where there is no ``pecil``:

    PYTHON -P benchmarks/avalanche_peer.py FOLDER METHOD SETTINGS

takes samples, their order and the initial weights from FOLDER/run.npz, learns with a method and
its settings (JSON), leaves the scores of the test set in FOLDER/scores.npy and prints JSON: the
seconds that learning and scoring took. (-P keeps this folder from hiding the package.)
"""

import json
import random
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SCORED = 500  # samples scored at a time
WHOLE = 10**6  # samples of a batch that takes any task
ONLINE = ("er", "er_ace", "der", "derpp")  # the buffer changes with every batch
MIXED = (*ONLINE, "icarl")  # samples of the buffer are drawn at random; so are those beside them


def import_torchvision() -> torch.library.Library | None:
    """Import torchvision, whose compiled part may not fit this torch; the other is all we need.

    It stops at two operators then that nobody has declared. Returned is what declares them, to
    be kept as long as they are; nothing here calls them.
    """
    try:
        import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_module("torchvision")
        return library
    return None


def network(weights: dict[str, Tensor]) -> tuple[nn.Sequential, nn.Linear]:
    """Return the body and the head of the perceptron with these weights."""
    layers: list[nn.Module] = []
    for name in sorted(key for key in weights if key.endswith("weight")):
        n_out, n_in = weights[name].shape
        linear = nn.Linear(n_in, n_out)
        linear.weight.data.copy_(weights[name])
        linear.bias.data.copy_(weights[name.replace("weight", "bias")])
        layers += [linear, nn.ReLU()]
    *body, head, _ = layers
    assert isinstance(head, nn.Linear)
    return nn.Sequential(*body), head


def strategy(method: str, body: nn.Sequential, head: nn.Linear, settings: dict[str, Any]) -> Any:
    """Return avalanche's object for a method."""
    supervised = import_module("avalanche.training.supervised")
    plugins = import_module("avalanche.training.plugins")
    storage = import_module("avalanche.training.storage_policy")
    given = dict(settings)
    batch, buffer = given.pop("batch_size"), given.pop("buffer", 0)
    model = nn.Sequential(body, head)
    adam = torch.optim.Adam(model.parameters(), lr=given.pop("lr"), fused=True)
    base: dict[str, Any] = {"optimizer": adam, "train_mb_size": batch, "evaluator": None}
    plain = base | {"model": model, "criterion": nn.CrossEntropyLoss()}
    rehearsing = plain | {"mem_size": buffer, "batch_size_mem": batch}

    def replay() -> Any:
        policy = storage.ReservoirSamplingBuffer(buffer)
        return plugins.ReplayPlugin(buffer, batch_size_mem=batch, storage_policy=policy)

    def si() -> Any:
        repair(plugins.SynapticIntelligencePlugin)
        return supervised.SynapticIntelligence(**plain, **given)

    def icarl() -> Any:
        own = {"feature_extractor": body, "classifier": head, "buffer_transform": None}
        return supervised.ICaRL(
            **base, **own, memory_size=buffer, fixed_memory=True, eval_mb_size=SCORED
        )

    def slda() -> Any:
        own: dict[str, Any] = {"slda_model": nn.Identity(), "criterion": nn.CrossEntropyLoss()}
        own |= {"input_size": body[0].in_features, "num_classes": head.out_features}
        return supervised.StreamingLDA(**own, train_mb_size=WHOLE, evaluator=None, **given)

    made: dict[str, Callable[[], Any]] = {
        "finetuning": lambda: supervised.Naive(**plain),
        "er": lambda: supervised.Naive(**plain, plugins=[replay()]),
        "agem": lambda: supervised.AGEM(**plain, sample_size=batch, **given),
        "ewc": lambda: supervised.EWC(**plain, **given),
        "si": si,
        "lwf": lambda: supervised.LwF(**plain, **given),
        "icarl": icarl,
        "der": lambda: supervised.DER(**rehearsing, **given),
        "derpp": lambda: supervised.DER(**rehearsing, **given),
        "er_ace": lambda: supervised.ER_ACE(**rehearsing),
        "slda": slda,
    }
    return made[method]()


def repair(plugin: Any) -> None:
    """Make SI keep copies of the weights; on a CPU it keeps the weights, which move on."""
    extract = plugin.extract_weights

    def copied(model: nn.Module, target: dict[str, Any], excluded: set[str]) -> None:
        extract(model, target, excluded)
        for kept in target.values():
            kept.data = kept.data.clone()

    plugin.extract_weights = staticmethod(copied)


def tasks(x: Tensor, y: Tensor, sizes: list[int], *, by_class: bool) -> Any:
    """Return the stream of tasks as avalanche has it.

    Samples keep their order, unless ``by_class``: then they come sorted by class, and the stream
    knows which classes it has, as iCaRL, which mixes them anyway, wants it.
    """
    benchmarks, dataset = import_module("avalanche.benchmarks"), torch.utils.data.TensorDataset
    if by_class:
        order = y.unique().tolist()
        whole, n = dataset(x, y), len(sizes)
        made = benchmarks.nc_benchmark(whole, whole, n, False, fixed_class_order=order)
    else:
        parts = list(map(dataset, x.split(sizes), y.split(sizes)))
        made = benchmarks.dataset_benchmark(parts, parts)
    return made.train_stream


def run(method: str, settings: dict[str, Any], given: dict[str, Tensor]) -> tuple[Tensor, float]:
    """Learn all tasks; return the scores of the test set and the seconds it took."""
    x, test_x = (given[name].flatten(1) / 255 for name in ("x", "test_x"))
    seed = int(given["seed"])
    random.seed(seed)
    torch.manual_seed(seed)
    body, head = network({name: value for name, value in given.items() if "." in name})
    stream = tasks(x, given["y"], given["sizes"].tolist(), by_class=method == "icarl")
    learner = strategy(method, body, head, settings)
    if method in ONLINE:
        stream = import_module("avalanche.benchmarks").split_online_stream(
            stream, settings["batch_size"], shuffle=False, access_task_boundaries=True
        )
    start = time.perf_counter()
    for task in stream:
        learner.train(task, shuffle=method in MIXED, reset_optimizer_state=True)
    learner.model.eval()
    score = learner.predict if method == "slda" else learner.model
    with torch.no_grad():
        scores = torch.cat([score(part) for part in test_x.split(SCORED)])
    return scores, time.perf_counter() - start


def main() -> None:
    """Do as the command line says."""
    folder, method, settings = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    with np.load(folder / "run.npz") as file:
        given = {name: torch.from_numpy(file[name]) for name in file.files}
    with warnings.catch_warnings(record=True):  # of what the package itself does
        declared = import_torchvision()
        scores, seconds = run(method, settings, given)
    np.save(folder / "scores.npy", scores.numpy())
    version = import_module("avalanche").__version__
    print(json.dumps({"seconds": seconds, "version": version}))
    del declared


if __name__ == "__main__":
    main()
