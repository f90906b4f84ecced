"""The command line.

Exit codes: 0 done, 1 the request cannot be met (a message says why), 2 the
command was not understood, 130 stopped by Ctrl-C, 143 told to end. Models and tables are written
whole or not at all. ``--json`` makes standard output pure JSON; warnings and progress go
to standard error, progress only to a terminal.
"""

try:
    import os
    import signal
    import sys
    import threading
    import warnings
    from collections.abc import Iterator, Sequence
    from contextlib import contextmanager
    from types import FrameType
    from typing import Annotated

    import typer

    import pecil
    from pecil.cli import models, runs, show
    from pecil.cli.common import app
except ImportError:
    raise SystemExit('pecil: the command line needs more: pip install "pecil[cli]"') from None
except KeyboardInterrupt:
    raise SystemExit(130) from None

__all__ = ["app", "main", "models", "runs", "show"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; mistakes become a message and exit code 1."""
    with _stoppable(), warnings.catch_warnings():
        warnings.showwarning = _show_warning
        # the commands compare the names of features themselves, then pass on plain arrays
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        try:
            app(args=arguments, prog_name="pecil")
        except (ValueError, OSError, ImportError, MemoryError, RuntimeError) as error:
            if not _is_foreseen(error):
                raise
            _print_line("pecil:", str(error) or type(error).__name__)
            raise SystemExit(1) from None


def _is_foreseen(error: Exception) -> bool:
    """Tell what a user can do something about from a mistake in the program."""
    if not isinstance(error, RuntimeError) or isinstance(error, NotImplementedError):
        return True
    texts = ("out of memory", "allocate memory", "enough memory")  # as PyTorch has it
    return any(text in str(error) for text in texts)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    _print_line("pecil: warning:", str(message))


def _print_line(head: str, text: str) -> None:
    print(head, " ".join(text.split()), file=sys.stderr)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let Ctrl-C, or ``kill``, end a command in order.

    Amid imports Ctrl-C is at times mistaken or lost.
    """
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if (
        usual[signal.SIGINT] is not signal.default_int_handler
        or usual[signal.SIGTERM] is not signal.SIG_DFL
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    for number in usual:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit at once if a module is being imported, else raise what lets everybody tidy up."""
    while frame is not None and frame.f_code is not main.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        frame = frame.f_back
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _version(wanted: bool) -> None:
    if wanted:
        print("pecil", pecil.__version__)
        raise typer.Exit


@app.callback()
def _pecil(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Learn new classes one at a time, from a single pass, without forgetting."""
