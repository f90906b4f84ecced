"""The hub's client against a small local stand-in for the hub."""

import hashlib
import io
import json
import socket
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from PIL import Image

from pecil.data import DATASETS, load

COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """Serves the files of dataset repositories as the Hugging Face hub does."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files = {}  # "owner/name/path" -> bytes
        self.stated = {}  # the same -> SHA-256, where it is not the true one
        self.headers = []

    def sha256(self, path):
        return self.stated.get(path, hashlib.sha256(self.files[path]).hexdigest())


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.headers.append(self.headers)
        if self.path.startswith("/api/datasets/"):
            repository, _, folder = self.path.partition("?")[0][14:].partition("/tree/main/")
            self.answer(json.dumps(self.listing(repository, folder)).encode())
        elif self.path.startswith("/datasets/"):
            path = self.path[10:].replace("/resolve/main/", "/").replace(f"/resolve/{COMMIT}/", "/")
            content = self.server.files.get(path)
            etag = self.server.sha256(path) if content is not None else ""
            self.answer(content, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})
        else:
            self.answer(None)

    do_HEAD = do_GET

    def listing(self, repository, folder):
        prefix = f"{repository}/{folder}/"
        return [
            {
                "type": "file",
                "path": path[len(repository) + 1 :],
                "size": len(content),
                "oid": "1" * 40,
                "lfs": {
                    "oid": self.server.sha256(path),
                    "size": len(content),
                    "pointerSize": 130,
                },
            }
            for path, content in self.server.files.items()
            if path.startswith(prefix)
        ]

    def answer(self, content, headers=None):
        self.send_response(404 if content is None else 200)
        content = content or b""
        for name, value in ({"Content-Length": len(content)} | (headers or {})).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Return a function that sends the client to another endpoint, in all it does."""

    def asking(url):
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setenv("HF_ENDPOINT", url)

    for name in ("HF_HUB_CACHE", "AGENT_HARNESSES_PATH"):
        monkeypatch.setattr(constants, name, str(tmp_path / name), raising=False)
    return asking


@pytest.fixture
def hub(ask):
    with Hub() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        ask(server.url)
        yield server
        server.shutdown()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PECIL_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def images(name, n, seed):
    info = DATASETS[name]
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(info.n_classes), n))
    return rng.integers(0, 256, (len(y), *info.shape)).astype(np.uint8), y


def table(name, x, y):
    """Encode images and labels as the hub's Parquet files do."""
    tables = DATASETS[name].tables
    encoded = []
    for array in x:
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, "PNG")
        encoded.append({"bytes": buffer.getvalue(), "path": None})
    columns = {tables.image: encoded, tables.label: y, "coarse_label": y // 5}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


@pytest.fixture
def publish(hub, monkeypatch):
    """Put a small copy of a dataset on the stand-in, its training part in two files."""

    def published(name):
        info = DATASETS[name]
        train, test = images(name, 4, seed=0), images(name, 2, seed=1)
        monkeypatch.setitem(
            DATASETS, name, replace(info, n_train=len(train[1]), n_test=len(test[1]))
        )
        place = f"{info.source}/{info.tables.folder}"
        hub.files |= {  # the second before the first: their names decide
            f"{place}/train-00001-of-00002.parquet": table(name, train[0][7:], train[1][7:]),
            f"{place}/train-00000-of-00002.parquet": table(name, train[0][:7], train[1][:7]),
            f"{place}/test-00000-of-00001.parquet": table(name, *test),
            f"{place}/extra-00000-of-00001.parquet": b"not wanted",
        }
        return train, test, place

    return published


@pytest.mark.parametrize("name", [name for name, info in DATASETS.items() if info.tables])
def test_a_download_is_the_dataset_and_is_kept(publish, hub, folder, name, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_not_to_be_sent")
    train, test, _ = publish(name)
    data = load(name)
    assert np.array_equal(data.train_x, train[0]) and np.array_equal(data.train_y, train[1])
    assert np.array_equal(data.test_x, test[0]) and np.array_equal(data.test_y, test[1])
    assert data.note == f"from the Hugging Face hub, {DATASETS[name].source}"
    assert [p.name for p in folder.iterdir()] == [f"{name}.npz"]  # nothing else is left
    assert not any("Authorization" in headers for headers in hub.headers)
    hub.files.clear()
    again = load(name, download=False)
    assert np.array_equal(again.train_x, train[0]) and again.note == data.note


def test_a_derived_dataset_downloads_its_parent(publish, folder):
    publish("svhn")
    assert np.bincount(load("balanced_svhn").train_y).tolist() == [4] * 10
    assert [p.name for p in folder.iterdir()] == ["svhn.npz"]


def test_root_is_where_a_download_is_kept(publish, tmp_path):
    publish("mnist")
    load("mnist", root=tmp_path / "new" / "place")
    assert (tmp_path / "new/place/mnist.npz").is_file()


def test_a_file_with_another_checksum_is_refused(publish, hub, folder):
    *_, place = publish("mnist")
    hub.stated[f"{place}/test-00000-of-00001.parquet"] = "ab" * 32
    with pytest.raises(ValueError, match=r"test-00000-of-00001.parquet did not arrive whole.*abab"):
        load("mnist")
    assert not list(folder.iterdir())


def test_another_number_of_samples_is_refused(publish, folder, monkeypatch):
    publish("mnist")
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], n_train=41))
    with pytest.raises(ValueError, match="has changed: expected 41 .*found 40 and 20"):
        load("mnist")
    assert not list(folder.iterdir())


def test_images_of_another_shape_are_refused(publish, hub, folder):
    _, test, place = publish("mnist")
    hub.files[f"{place}/test-00000-of-00001.parquet"] = table("mnist", test[0][:, :27], test[1])
    with pytest.raises(ValueError, match=r"expected images of shape \(28, 28\), found \(27, 28\)"):
        load("mnist")
    assert not list(folder.iterdir())


def test_a_repository_without_the_files_is_refused(publish, hub, folder):
    *_, place = publish("mnist")
    del hub.files[f"{place}/test-00000-of-00001.parquet"]
    with pytest.raises(ValueError, match=r"ylecun/mnist has no mnist/test-\*.parquet"):
        load("mnist")


def test_a_hub_out_of_reach_says_how_else_to_get_it(folder, ask, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client tries again and again
    with socket.socket() as unused:  # bound, but nobody listens
        unused.bind(("127.0.0.1", 0))
        ask(f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ConnectionError, match="cannot download ylecun/mnist.*MNIST is not at"):
            load("mnist")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("module", ["huggingface_hub", "pyarrow.parquet", "PIL.Image"])
def test_without_what_it_takes_the_extra_is_named_at_once(
    publish, hub, folder, monkeypatch, module
):
    publish("mnist")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install "pecil\[hub\]".*MNIST is not at'):
        load("mnist")
    assert not hub.headers and not list(folder.iterdir())


def test_nothing_is_asked_of_the_hub_where_a_file_is_found(publish, hub, folder):
    publish("mnist")
    load("mnist")
    asked = len(hub.headers)
    load("mnist")
    assert asked > 0 and len(hub.headers) == asked
