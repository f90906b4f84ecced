"""The results store, and results as files.

Results are kept in SQLite, in WAL mode (a log of changes beside the database), because

* several processes write at once, the workers of a sweep or two sweeps: writers wait for one
  another by locks of the operating system, and readers wait for nobody;
* a process may be killed at any moment: a result is there as a whole or not at all when the
  store is opened next. A line appended to a file can be cut short, and one cannot append to a
  Parquet file;
* whether an experiment is finished is one lookup by its key;
* it is one file, of the standard library's, that DuckDB, pandas and R can query.

WAL needs the memory of one machine: on a cluster, where processes share nothing but a network
file system, one process must write for all (`pecil.engines.ray` does it so).

Published runs are JSON lines, which differ line by line: `results/*.jsonl`.
"""

import csv
import json
import os
import sqlite3
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pecil.bench.experiment import Result
from pecil.files import written_whole

try:
    import fcntl
except ImportError:  # not a POSIX system: no claims
    fcntl = None  # type: ignore[assignment]

DEFAULT = Path("results", "store.sqlite")
DETAILS = ("confusion", "accuracy_per_class_after_task")  # as long as all else many times over
PAGE = 1000  # rows read at a time
PATIENCE = 120  # seconds to wait for other writers
KINDS = (".jsonl", ".csv", ".parquet")
SCHEMA = """
CREATE TABLE results (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order in which they came
    key TEXT NOT NULL UNIQUE,                  -- of the experiment
    result TEXT NOT NULL,                      -- JSON, without the details
    crc INTEGER NOT NULL,                      -- CRC-32 of it
    details BLOB NOT NULL                      -- JSON, by zlib, which has a checksum of its own
);
CREATE TABLE replaced (                        -- earlier runs of experiments that were run again
    number INTEGER PRIMARY KEY, key TEXT, result TEXT, crc INTEGER, details BLOB
);
CREATE TABLE damaged (                         -- what cannot be read, and why
    number INTEGER PRIMARY KEY, key TEXT, result TEXT, crc INTEGER, details BLOB, reason TEXT
);
"""
ADD = "INSERT INTO results (key, result, crc, details) VALUES (?, ?, ?, ?)"


@dataclass(frozen=True)
class Damaged:
    """A line of a file or a row of a store that is no result, and why."""

    path: Path
    line: int
    reason: str
    part: str = "line"

    def __str__(self) -> str:
        return f"{self.path}, {self.part} {self.line}: {self.reason}"


class Store:
    """Results by experiment, safe with several processes and with a kill at any moment.

    Nothing is ever lost: a result that takes the place of another moves that one to the table
    ``replaced``, and a row that cannot be read moves to the table ``damaged``. Every operation
    opens the file anew, so that a store may be used after a fork and from any thread.

    Parameters
    ----------
    path : path-like, optional
        The file, created by the first `add`; by default the environment variable
        ``PECIL_STORE``, else ``results/store.sqlite``.

    Examples
    --------
    >>> import tempfile
    >>> from pecil.bench import planned, run
    >>> store = Store(Path(tempfile.mkdtemp()) / "store.sqlite")
    >>> store.add(run(planned("nearest_mean", "digits"), device="cpu"))
    >>> planned("nearest_mean", "digits").key in store, len(store)
    (True, 1)
    >>> [result.experiment.method for result in store.results()]
    ['nearest_mean']
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path or os.environ.get("PECIL_STORE") or DEFAULT)

    def prepare(self) -> None:
        """Refuse a path where nothing can be written; make the folder if it is the default."""
        if self.path == DEFAULT:
            self.path.parent.mkdir(exist_ok=True)
        if not self.path.parent.is_dir():
            raise FileNotFoundError(
                f"cannot write {self.path}: there is no folder {self.path.parent}"
            )

    def add(self, *results: Result) -> None:
        """Add results, all of them or none, whatever was there of the same experiments."""
        rows = [_packed(result) for result in results]
        with self._writing() as database:
            for row in rows:
                database.execute(
                    "INSERT INTO replaced SELECT * FROM results WHERE key = ?", row[:1]
                )
                database.execute("DELETE FROM results WHERE key = ?", row[:1])
                database.execute(ADD, row)

    def __contains__(self, key: str) -> bool:
        return bool(self._read("SELECT 1 FROM results WHERE key = ?", (key,)))

    def __len__(self) -> int:
        return sum(count for (count,) in self._read("SELECT COUNT(*) FROM results"))

    def get(self, key: str) -> Result | None:
        """Return the result of an experiment, None if there is none that can be read."""
        rows = self._read("SELECT * FROM results WHERE key = ?", (key,))
        return next(self._unpacked(rows), None)

    def results(self, *, details: bool = True) -> Iterator[Result]:
        """Yield all results in the order in which they came; set aside what is damaged.

        Parameters
        ----------
        details : bool
            Whether to read confusion matrices and accuracies of classes after every task, which
            take most of the time. If not, they are None.
        """
        columns = "*" if details else "number, key, result, crc"
        page = f"SELECT {columns} FROM results WHERE number > ? ORDER BY number LIMIT {PAGE}"
        last = 0
        while rows := self._read(page, (last,)):
            last = rows[-1][0]
            yield from self._unpacked(rows)

    def damaged(self) -> list[Damaged]:
        """Return what was set aside and has not been run again since."""
        rows = self._read(
            "SELECT number, reason FROM damaged WHERE key NOT IN (SELECT key FROM results)"
        )
        return [Damaged(self.path, number, reason.decode(), "row") for number, reason in rows]

    def export(self, path: str | os.PathLike[str], *, details: bool = True) -> int:
        """Write all results to a file, see `export_results`; return how many."""
        return export_results(self.results(details=details), path)

    def import_(self, paths: Iterable[str | os.PathLike[str]]) -> tuple[int, list[Damaged]]:
        """Add the results of files (.jsonl, or other stores) whose experiments are not here.

        Returns
        -------
        int
            How many were added.
        list of Damaged
            What could not be read.
        """
        added, damaged = 0, []
        for path in map(Path, paths):
            found, broken = read(path)
            known = {key.decode() for (key,) in self._read("SELECT key FROM results")}
            new = [result for result in found if result.experiment.key not in known]
            self.add(*new)
            added += len(new)
            damaged += broken
        return added, damaged

    @contextmanager
    def claim(self, key: str, *, wait: bool = False) -> Iterator[bool]:
        """Say whether an experiment is this process's to run, until the block ends.

        The claim is a lock of the operating system on a byte of the file ``PATH.claims``: it
        ends with its process, however that ends. A process has one claim at a time.

        Parameters
        ----------
        key : str
            Of the experiment.
        wait : bool
            Wait until nobody else has it.
        """
        if fcntl is None:
            yield True
            return
        self.prepare()
        with open(f"{self.path}.claims", "ab") as file:
            try:
                how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
                fcntl.lockf(file, how, 1, int(key, 16) >> 2)  # keys are 64 bits, places 62
            except BlockingIOError:
                yield False
            else:
                yield True

    def _unpacked(self, rows: Iterable[Sequence[Any]]) -> Iterator[Result]:
        for row in rows:
            try:
                yield _unpacked(*row)
            except (ValueError, TypeError, zlib.error) as error:
                self._set_aside(row[0], str(error))

    def _set_aside(self, number: int, reason: str) -> None:
        with self._writing() as database:
            database.execute(
                "INSERT INTO damaged SELECT *, ? FROM results WHERE number = ?", (reason, number)
            )
            database.execute("DELETE FROM results WHERE number = ?", (number,))

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Yield the database in a transaction of one's own, which a failure undoes."""
        self.prepare()
        if not self.path.exists():
            self._create()
        with self._opened() as database:
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")

    def _create(self) -> None:
        """Make an empty store under another name and give it its own in one step.

        Of several processes that do so at once one is the first, and all use its file. None
        may turn a file that others have open into WAL mode: SQLite refuses without waiting.
        """
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=".store-") as folder:
            made = Path(folder, "new.sqlite")
            with closing(sqlite3.connect(made)) as database:
                database.execute("PRAGMA journal_mode = WAL")
                database.executescript(SCHEMA)
            with suppress(FileExistsError):
                os.link(made, self.path)

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return what a query finds: nothing where there is no store yet."""
        if not self.path.exists():
            return []
        with self._opened() as database:
            return database.execute(query, values).fetchall()

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(
                sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
            ) as database:
                database.text_factory = bytes  # what is damaged may be no text
                yield database
        except sqlite3.OperationalError as error:
            raise OSError(f"{self.path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"expected a store of results at {self.path}: {error}") from error


def _packed(result: Result) -> tuple[str, str, int, bytes]:
    """Turn a result into key, JSON, CRC-32 and details."""
    row = result.row()
    details = {name: row.pop(name) for name in DETAILS}
    text = _json(row)
    return row["key"], text, zlib.crc32(text.encode()), zlib.compress(_json(details).encode())


def _unpacked(
    number: int, key: bytes, text: bytes, crc: int, details: bytes | None = None
) -> Result:
    """Turn a row of the store into a result; ValueError says what is wrong with it."""
    if zlib.crc32(text) != crc:
        raise ValueError("the record is not what was written: its checksum differs")
    row = json.loads(text)
    if details is not None:
        row |= json.loads(zlib.decompress(details))
    result = Result.from_row(row)
    if row["key"].encode() != key:
        raise ValueError(f"the key {key!r} is not that of the experiment, {row['key']}")
    return result


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read(path: str | os.PathLike[str]) -> tuple[list[Result], list[Damaged]]:
    """Read the results of a file, JSON lines or a store, and what of it is damaged."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file of results {path}")
    if path.suffix == ".jsonl":
        return read_lines([path])
    store = Store(path)
    return list(store.results()), store.damaged()


def export_results(results: Iterable[Result], path: str | os.PathLike[str]) -> int:
    """Write results to a file of JSON lines, a CSV or a Parquet file; return how many.

    They are sorted by experiment, the seeds of one after the other. In a table whatever is no
    number or text is written as JSON.
    """
    suffix = Path(path).suffix
    if suffix not in KINDS:
        raise ValueError(f"expected a file that ends in {', '.join(KINDS)}, got {path}")
    rows = [result.row() for result in sorted(results, key=_place)]
    with written_whole(path) as temporary:
        if suffix == ".jsonl":
            temporary.write_text("".join(f"{_json(row)}\n" for row in rows), encoding="utf-8")
        elif suffix == ".csv":
            _write_csv(rows, temporary)
        else:
            _write_parquet(rows, temporary)
    return len(rows)


def _place(result: Result) -> tuple[Any, ...]:
    experiment = result.experiment
    settings = json.dumps(experiment.settings, sort_keys=True)
    about = (experiment.method, experiment.dataset, experiment.split, settings)
    stream = experiment.epochs, experiment.steps, experiment.random_classes
    return (*about, *stream, experiment.buffer, experiment.validation, experiment.seed)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _json(value) if isinstance(value, dict | list) else value
        for name, value in row.items()
    }


def _write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0] if rows else (), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(_flat, rows))


def _write_parquet(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError('Parquet needs pyarrow: pip install "pecil[files]"') from error
    parquet.write_table(pyarrow.Table.from_pylist([_flat(row) for row in rows]), path)


def append_line(path: str | os.PathLike[str], result: Result) -> None:
    """Append a result to a file in one write, whatever state its last line is in.

    Parameters
    ----------
    path : path-like
        A ``.jsonl`` file; created where there is none.
    result : Result
        What to add.
    """
    line = _json(result.row()).encode() + b"\n"
    with open(path, "ab+", buffering=0) as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # the writer before us was stopped in the middle
                line = b"\n" + line
        written = file.write(line)
        os.fsync(file.fileno())
    if written != len(line):
        raise OSError(f"{path}: wrote only {written} of {len(line)} bytes of a result")


def read_lines(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[Result], list[Damaged]]:
    """Read results, the last one where an experiment was run twice.

    Parameters
    ----------
    paths : iterable of path-like
        Files of JSON lines.

    Returns
    -------
    results : list of Result
        In the order in which they were first written.
    damaged : list of Damaged
        The lines that could not be read; they are left where they are.
    """
    results: dict[str, Result] = {}
    damaged = []
    for path in map(Path, paths):
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                result = Result.from_row(json.loads(line))
            except ValueError as error:
                damaged.append(Damaged(path, number, str(error)))
            else:
                results[result.experiment.key] = result
    return list(results.values()), damaged
