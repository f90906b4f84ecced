"""What docs/features.md shows, runs; its tables are those of the results."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

import features  # benchmarks/features.py
from common import kept
from pecil import WhitenedPEC

PAGE = (Path(__file__).parents[1] / "docs" / "features.md").read_text(encoding="utf-8")


def write(folder, label, colour, n=12):
    random = np.random.default_rng(0)
    (folder / label).mkdir(parents=True, exist_ok=True)
    for k in range(n):
        pixels = np.clip(random.normal(colour, 20, (12, 10, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / label / f"{k}.png")


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    timm = SimpleNamespace(create_model=lambda name, **options: torch.nn.Conv2d(3, 8, 3))
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "monday", "rose", (200, 40, 40))
    write(tmp_path / "monday", "leaf", (40, 200, 40))
    write(tmp_path / "tuesday", "sky", (40, 40, 200))
    write(tmp_path, "wednesday", (40, 40, 200), n=2)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == "['sky' 'sky']\n"
    assert WhitenedPEC.load(tmp_path / "model.pecil").classes_.tolist() == ["leaf", "rose", "sky"]
    assert len(list((tmp_path / "features").rglob("*.npz"))) == 3


def test_the_tables_are_up_to_date():
    """If not: python benchmarks/features.py --table."""
    for name, text in features.tables(kept(features.RESULTS)).items():
        assert f"<!-- {name}: begin -->\n{text}\n<!-- {name}: end -->" in PAGE
