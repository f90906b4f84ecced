import json
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import typer

from pecil import cli
from pecil.cli import common


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fit nothing.csv -o m.pecil", "'nothing.csv' is neither a dataset nor a path"),
        ("fit digits -o no/such/m.pecil", "there is no folder no/such"),
        ("fit digits -o results", "cannot write results: it is a folder"),
        ("fit digits -o foreign.pecil", "foreign.pecil: it is there and is no pecil model; choose"),
        ("fit foreign.pecil -o foreign.pecil", "cannot write foreign.pecil: it is what is to be"),
        ("fit digits -o m.pecil --method pec --set size=9", "PEC has no setting size; it has act"),
        ("fit digits -o m.pecil --method pec --set balancing=buffer", "no setting balancing; it"),
        ("fit digits -o m.pecil --set size=9", "Whitened PEC has no setting size; it has channels"),
        (
            "fit digits -o m.pecil --method pec --set lrr=1",
            "PEC has no setting lrr; it has activation, ",
        ),
        (
            "fit digits -o m.pecil --method pec --lr -1",
            "lr must be a positive number, but it is -1",
        ),
        (
            "fit digits -o m.pecil --method pec --set lr=fast",
            "lr must be a positive number, but it is 'fast'",
        ),
        (
            "fit digits -o m.pecil --method pec --architecture tree",
            "one of auto, mlp, conv, linear, but",
        ),
        ("fit digits -o m.pecil --device abacus", "expected auto, cpu, cuda, ..., got 'abacus'"),
        ("fit digits -o m.pecil --device meta", "expected auto, cpu, cuda, ..., got 'meta'"),
        ("fit digits -o m.pecil --label kind", "label='kind' is for CSV"),
        (
            "fit digits -o m.pecil --lr 0.1",
            "Whitened PEC, unlike --method pec, has no setting lr; it has channels, device, dim, ",
        ),
        (
            "fit digits -o m.pecil --method pec --memory 9",
            "PEC, unlike --method whitened_pec, has no setting memory; it has activation, ",
        ),
        ("fit digits -o m.pecil --set lrr=1", "Whitened PEC has no setting lrr; it has channels,"),
        ("fit digits -o m.pecil --memory -1", "memory must be a positive number, but it is -1"),
        ("fit digits -o m.pecil --teacher tree", "teacher must be one of auto, natural, strokes,"),
        ("fit digits -o m.pecil --set gamma=1", "the teacher 'strokes' has no setting gamma"),
        ("learn nothing.pecil digits", "no model file nothing.pecil"),
        ("predict foreign.pecil digits", "foreign.pecil is not a pecil model"),
        ("info foreign.pecil", "foreign.pecil is not a pecil model"),
        ("run ere digits", "expected a method out of whitened_pec, pec, randumb,"),
        ("run pec digits --split 3/3", "possible are 10/1"),
        ("run pec digits --set shuffle=true", "pec has no setting shuffle; it has"),
        ("run pec digits --save-results no/such/r.jsonl", "there is no folder no/such"),
        ("run er digits --set lr=abc", "er: lr must be of type float, but it is 'abc'"),
        ("run slda digits --set shrinkage=abc", "slda: shrinkage must be of type float, but it is"),
        ("run ewc digits --set hidden=abc", "ewc: hidden must be of type Sequence[int], but"),
        ("run ewc digits --set lam=[1]", "ewc: lam must be of type float, but it is [1]"),
        ("run er digits --set hidden=[-1]", "er cannot be made with the settings {'hidden': [-1]"),
        ("run pec digits --save-results foreign.pecil/r.jsonl", "there is no folder foreign.pecil"),
        (
            "run pec foreign.pecil --save-results foreign.pecil",
            "foreign.pecil: it is what is to be",
        ),
        ("table --results foreign.pecil -o foreign.pecil", "foreign.pecil: it is what is to be"),
        ("report --results foreign.pecil -o foreign.pecil", "foreign.pecil: it is what is to be"),
        ("figure memory --store foreign.pecil -o foreign.pecil", "foreign.pecil: it is what is to"),
        ("run finetuning digits --set batch_size=0", "batch_size must be a whole number from 1"),
        ("table table9", "expected a table out of table1, table2, "),
        ("table --results nothing.jsonl", "nothing.jsonl"),
        ("figure speed", "expected a figure out of epochs, "),
        ("sweep table9", "expected a table out of table1, table2, "),
        ("sweep whitened --only mnist/best", "none of these can be run: mnist/best"),
        ("sweep table1 --only mars/pec", "table table1 has no cell mars/pec: expected DATASET/ROW"),
        ("search whitened_pec digits", "there is no grid for whitened_pec: say which values"),
        ("search pec digits --grid lr=3", "lr: expected a list of values to try, got 3"),
        ("search pec digits --grid lrr=[3]", "pec has no setting lrr; it has"),
        ("results --import nothing.jsonl", "there is no file of results nothing.jsonl"),
        ("results --store foreign.pecil", "expected a store of results at foreign.pecil"),
        ("run pec digits --store no/such.sqlite", "there is no folder no"),
        (
            "figure memory",
            "no results to draw: expected runs of whitened_synthetic, whitened_pec, pec, ",
        ),
        ("figure memory -o no/such.png", "there is no folder no"),
    ],
)
def test_a_users_mistake_is_one_paragraph_and_exit_code_1(
    line, message, tmp_path, monkeypatch, pecil
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign.pecil").write_text("not a model")
    (tmp_path / "results").mkdir()
    code, out, err = pecil(*line.split())
    assert (code, out) == (1, "")
    assert err.startswith("pecil: ")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(os.listdir()) == ["foreign.pecil", "results"]


@pytest.mark.parametrize(
    "line",
    [
        "fly",
        "fit digits",
        "fit digits -o m.pecil --lr fast",
        "fit digits -o m.pecil --standardise --set mean=0.5",
        "fit digits -o m.pecil --standardise --set std=0.5",
        "fit digits -o m.pecil --method er",
        "run pec digits --seed 1 --seeds 2",
        "run pec digits --set lr",
        "list stars",
    ],
)
def test_a_command_that_is_not_understood_is_exit_code_2(line, pecil):
    code, out, err = pecil(*line.split())
    assert (code, out) == (2, "")
    assert "Usage" in err


def test_help_names_the_extras_that_are_needed(pecil):
    named = set()
    for name, command in typer.main.get_command(cli.app).commands.items():
        code, out, _ = pecil(name, "--help")
        texts = [command.help, *(getattr(param, "help", None) for param in command.params)]
        extras = set(re.findall(r"pecil\\?\[\w+]", " ".join(filter(None, texts))))
        wanted = {extra.replace("\\", "") for extra in extras}
        assert code == 0 and wanted == {extra for extra in wanted if extra in out}, name
        named |= wanted
    assert named == {"pecil[search]", "pecil[timm]"}


def test_json_has_null_for_what_is_no_number(capsys):
    common.print_json({"a": [math.nan, np.float32("inf"), 1.5], "b": "NaN ä", "c": -math.inf})
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told == {"a": [None, None, 1.5], "b": "NaN ä", "c": None}


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory:\n  you tried"), None),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9"), None),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), None),
        (MemoryError("the teacher needs 9 GiB"), None),
        (MemoryError(), "pecil: MemoryError\n"),
        (NotImplementedError("Could not run 'aten::qr'"), None),
    ],
)
def test_what_a_machine_cannot_do_is_one_line(error, line, monkeypatch, pecil):
    def command(**_):
        raise error

    monkeypatch.setattr(cli, "app", command)
    expected = line or f"pecil: {' '.join(str(error).split())}\n"
    assert pecil() == (1, "", expected)


def test_a_mistake_in_the_program_keeps_its_traceback(monkeypatch):
    def command(**_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(cli, "app", command)
    with pytest.raises(RuntimeError, match="illegal"):
        cli.main([])


@pytest.mark.filterwarnings("always")
def test_a_warning_is_one_line(monkeypatch, pecil):
    def command(**_):
        warnings.warn("inputs are large:\n  scale them", stacklevel=1)
        sys.exit()

    monkeypatch.setattr(cli, "app", command)
    usual = warnings.showwarning
    assert pecil() == (0, "", "pecil: warning: inputs are large: scale them\n")
    assert warnings.showwarning is usual


def test_version(pecil):
    code, out, _ = pecil("--version")
    assert code == 0
    assert re.fullmatch(r"pecil \d+\.\d+\.\d+\n", out)


def test_without_typer_the_extra_is_named():
    code = "import sys; sys.modules['typer'] = None; import pecil.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == 'pecil: the command line needs more: pip install "pecil[cli]"\n'


def test_help_and_version_come_without_the_heavy_libraries():
    program = """
import sys
from pecil.cli import main
for line in ("--help", "--version", "predict --help", "fit digits", "fly"):
    try:
        main(line.split())
    except SystemExit:
        pass
print({"torch", "sklearn"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.endswith("\nset()\n")


@pytest.mark.parametrize(
    ("module", "lost"), [("typer", "()"), ("torch", "()"), ("torch", "KeyboardInterrupt")]
)
def test_ctrl_c_amid_imports(module, lost, tmp_path):
    """Stand in for a module that interrupts itself, and may turn that into another error."""
    (tmp_path / f"{module}.py").write_text(f"""
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except {lost}:
    raise RuntimeError("a module is only half there") from None
""")
    done = subprocess.run(
        [sys.executable, "-c", "from pecil.cli import main; main()", "run", "pec", "digits"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_command_told_to_end_tidies_up():
    program = """
import os, signal, time
from pecil import cli

def command(**_):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        print("tidy")

cli.app = command
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (143, "tidy\n", "")


def test_an_ignored_ctrl_c_stays_ignored_and_a_thread_may_run_commands(monkeypatch, pecil):
    during = []

    def command(**_):
        during.append(signal.getsignal(signal.SIGINT))
        sys.exit()

    monkeypatch.setattr(cli, "app", command)
    usual = signal.getsignal(signal.SIGINT)
    try:
        for before in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(signal.SIGINT, before)
            pecil()
            assert signal.getsignal(signal.SIGINT) is before
        with ThreadPoolExecutor(1) as pool:
            pool.submit(pecil).result()
    finally:
        signal.signal(signal.SIGINT, usual)
    ignored, ours, threads = during
    assert ignored is signal.SIG_IGN
    assert ours is not signal.default_int_handler
    assert threads is signal.default_int_handler


STOPPED_WHILE = {
    "learning": """
def slow(self, *arguments, **options):
    original(self, *arguments, **options)
    wait()
original, PEC.partial_fit = PEC.partial_fit, slow
""",
    "saving": """
import os
def slow(source, target):
    wait()
os.replace = slow
""",
}


@pytest.mark.parametrize("moment", STOPPED_WHILE)
def test_ctrl_c_leaves_the_previous_model_intact(moment, tmp_path, data, model):
    """Send a real SIGINT to a real process, held at the worst moments."""
    program = f"""
import sys, time
from pecil import PEC
from pecil.cli import main
def wait():
    print("now", flush=True)
    time.sleep(60)
{STOPPED_WHILE[moment]}
main()
"""
    more, before = data("cd"), model.read_bytes()
    files = sorted(tmp_path.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-c", program, "learn", model, more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out == ""
    assert model.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == files
