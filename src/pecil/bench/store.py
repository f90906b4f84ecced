"""Results as JSON lines: one run, one line, appended whole."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pecil.bench.experiment import Result


@dataclass(frozen=True)
class Damaged:
    """A line that is no result, and why."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


def append(path: str | os.PathLike[str], result: Result) -> None:
    """Append a result to a file in one write, whatever state its last line is in.

    Parameters
    ----------
    path : path-like
        A ``.jsonl`` file; created where there is none.
    result : Result
        What to add.
    """
    line = json.dumps(result.row(), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    with open(path, "ab+", buffering=0) as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # the writer before us was stopped in the middle
                line = b"\n" + line
        written = file.write(line)
        os.fsync(file.fileno())
    if written != len(line):
        raise OSError(f"{path}: wrote only {written} of {len(line)} bytes of a result")


def read(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[Result], list[Damaged]]:
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
