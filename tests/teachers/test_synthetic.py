import json
import math

import pytest
import torch
import torch.nn.functional as F

from pecil.teachers import synthetic
from pecil.teachers.network import load_weights
from pecil.teachers.scenes import draw
from pecil.teachers.synthetic import Settings, Training, View, barlow, scene, simclr, train, vicreg

TINY = {
    "channels": (4, 6, 8, 8, 12, 12),
    "families": {"leaves": 1.0, "glyphs": 1.0},
    "pictures": 64,
    "side": 40,
    "batch": 16,
    "lr": 0.01,
}


def chance():
    return torch.Generator().manual_seed(0)


# --------------------------------------------------------------------------------- views


def test_views_are_crops_of_the_pictures():
    side = 32
    ramp = torch.linspace(0, 255, side).round().byte()
    pictures = torch.stack(
        [ramp.expand(side, side), ramp.expand(side, side).T, ramp.expand(side, side)]
    )
    pictures = pictures.expand(40, 3, side, side)
    found = synthetic.view(pictures, Settings(colour=0, crop=0.3), chance())
    x = found.pictures
    assert x.shape == (40, 3, 32, 32)
    spread = x[:, 0].mean(1).diff(dim=1).mean(1) * side  # of the ramp within a view
    torch.testing.assert_close(spread, found.where[:, 0, 0], rtol=0.1, atol=0.03)
    assert 0.25 < (found.where[:, 0, 0] < 0).float().mean() < 0.75  # some are mirrored
    sizes = found.where[:, 0, 0].abs() * found.where[:, 1, 1]
    assert sizes.min() > 0.29 and sizes.max() <= 1
    assert (found.where[:, :, 2].abs() <= 1 - found.where[:, [0, 1], [0, 1]].abs() + 1e-6).all()


def test_light_and_colours_change_only_if_asked_to():
    pictures = torch.full((50, 3, 40, 40), 128, dtype=torch.uint8)
    plain = synthetic.view(pictures, Settings(colour=0), chance()).pictures
    changed = synthetic.view(pictures, Settings(), chance()).pictures
    assert plain.mean((2, 3)).std(0).max() < 0.01 < 0.05 < changed.mean((2, 3)).std(0).min()
    assert changed.mean((2, 3)).std(1).mean() > 0.01  # colours, too


# ---------------------------------------------------------------------------- objectives


def test_simclr_is_the_cross_entropy_of_finding_the_other_view():
    a, b = torch.randn(2, 5, 4, generator=chance()).unbind()
    z = F.normalize(torch.cat([a, b]), dim=1)
    total = 0.0
    for i in range(10):
        others = [j for j in range(10) if j != i]
        odds = torch.stack([(z[i] @ z[j]) / 0.3 for j in others]).softmax(0)
        total -= math.log(odds[others.index((i + 5) % 10)])
    assert float(simclr(a, b, 0.3)) == pytest.approx(total / 10, rel=1e-4)


def test_barlow_and_vicreg_want_views_alike_and_numbers_apart():
    a = torch.randn(400, 6, generator=chance())
    same = a[:, :1].expand(-1, 6)
    noise = torch.randn(400, 6, generator=torch.Generator().manual_seed(1))
    for loss in (barlow, vicreg):
        good = float(loss(a, a))
        assert good < float(loss(a, noise))
        assert good < float(loss(same, same))
        assert good < float(loss(0 * a, 0 * a))
    assert float(barlow(a, a)) < 0.01


def test_a_scene_is_told_where_the_view_looks():
    drawn = draw({"leaves": 1}, 6, side=32)
    where = torch.eye(2, 3).repeat(6, 1, 1)
    cells = (torch.arange(8) * 4 + 2)[None, :]
    seen = drawn.seen[:, cells.T, cells].long()
    traits = drawn.traits[torch.arange(6).view(-1, 1, 1), seen].float()

    def told(mirrored=False):
        t = traits.flip(2) if mirrored else traits
        sign = -1 if mirrored else 1
        kinds = 50 * F.one_hot(t[..., 0].long(), 4).float()
        paints = 50 * F.one_hot(t[..., 1].long(), 5).float()
        rest = torch.stack([t[..., 2], sign * t[..., 3], t[..., 4]], 3)
        return torch.cat([kinds, paints, rest], 3).movedim(3, 1)

    x = torch.zeros(6, 3, 32, 32)
    assert float(scene(told(), View(x, where), drawn.seen, drawn.traits)) < 0.05
    flipped = torch.stack([-where[:, 0], where[:, 1]], 1)
    assert float(scene(told(mirrored=True), View(x, flipped), drawn.seen, drawn.traits)) < 0.05
    assert float(scene(told(), View(x, flipped), drawn.seen, drawn.traits)) > 0.3


def test_the_second_view_may_be_of_the_same_things_elsewhere(monkeypatch):
    looked = []

    def view(pictures, *_):
        looked.append(pictures)
        return View(pictures.float()[:, :, :32, :32] / 255, torch.eye(2, 3).repeat(16, 1, 1))

    monkeypatch.setattr(synthetic, "view", view)
    for share, least, most in ((0, 0, 0), (0.5, 1, 15), (1, 16, 16)):
        looked.clear()
        training = Training(Settings(**TINY, elsewhere=share, steps=1), "cpu")
        assert len(training.drawn.pictures) == 64 * (1 + bool(share))
        training.step()
        differ = (looked[0] != looked[1]).any((1, 2, 3)).sum()
        assert least <= differ <= most


@pytest.mark.parametrize("deep", [1, 3])
@pytest.mark.parametrize("objective", synthetic.OBJECTIVES)
def test_every_objective_becomes_smaller(objective, deep):
    changes = {"objective": objective, "deep": deep, "steps": 40, "elsewhere": 0.5}
    settings = Settings(**TINY | changes)
    training = Training(settings, "cpu")
    losses = []
    for _ in range(40):
        training.step()
        losses.append(float(training.loss.detach()))
    assert sum(losses[-8:]) < 0.97 * sum(losses[:8])


@pytest.mark.parametrize("deep", [1, 2, 3])
def test_as_many_blocks_are_taught_as_asked_for(deep):
    training = Training(Settings(**TINY, deep=deep, steps=1), "cpu")
    usual = Training(Settings(**TINY, steps=1), "cpu")
    for mine, theirs in zip(training.encoder.parameters(), usual.encoder.parameters(), strict=True):
        assert torch.equal(mine, theirs)  # the seed's first weights
    training.step()
    sizes = [head.layers[0].weight.shape[1] for head in training.heads]
    assert sizes == [12, 8, 6][:deep]
    assert all(head.layers[0].weight.grad.abs().sum() > 0 for head in training.heads)


# ------------------------------------------------------------------------------ training


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not(tmp_path):
    whole = Settings(**TINY, steps=6)
    train(whole, tmp_path / "one", device="cpu", every=6)
    stopped = []

    def stop(row):
        stopped.append(row)
        if len(stopped) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(whole, tmp_path / "two", device="cpu", every=3, report=stop)
    path = train(whole, tmp_path / "two", device="cpu", every=3, report=stop)
    assert [row["step"] for row in stopped] == [3, 6]
    one = load_weights(str(tmp_path / "one" / "weights.safetensors"))
    two = load_weights(str(path))
    assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)
    assert one.about["settings"]["families"] == TINY["families"]
    log = list(map(json.loads, (tmp_path / "two" / "log.jsonl").read_text().splitlines()))
    assert [row["step"] for row in log] == [3, 6] and log[-1]["loss"] > 0
    with pytest.raises(
        ValueError, match=r"of a training with other settings: lr 0.01 instead of 0.1"
    ):
        train(Settings(**TINY | {"lr": 0.1, "steps": 6}), tmp_path / "two", device="cpu")


def test_the_rate_rises_and_falls():
    training = Training(Settings(**TINY, steps=1000), "cpu")
    rates = []
    for step in (0, 99, 199, 500, 999):
        training.done = step
        rates.append(training.rate() / 0.01)
    assert rates[0] == pytest.approx(1 / 200, rel=1e-3) and rates[1] == pytest.approx(0.5, rel=0.05)
    assert rates[2] == max(rates) and rates[3] == pytest.approx(0.5) and rates[4] < 1e-4


def test_a_minute_of_training_teaches_digits_and_says_so(tmp_path, capsys):
    arguments = ["--channels", "8,8,12,12,16,16", "--families", "strokes,glyphs=2", "--lr", "0.01"]
    arguments += ["--pictures", "256", "--batch", "32", "--steps", "30", "--every", "15"]
    arguments += ["--device", "cpu", "--datasets", "digits", "--samples", "800"]
    synthetic.main([str(tmp_path), *arguments])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [15, 30]
    assert rows[-1]["digits"] > 0.9 and rows[-1]["steps_a_second"] > 0
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["families"] == {"strokes": 1.0, "glyphs": 2.0}
    assert settings["channels"] == [8, 8, 12, 12, 16, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--objective", "guess"], "objective must be one of simclr, .*scene, but it is 'guess'"),
        (["--families", "cats"], "families out of .*, got 'cats'"),
        (["--steps", "0"], "steps must be at least 1, but it is 0"),
        (["--deep", "4"], "deep must be from 1 to 3, but it is 4"),
        (["--crop", "1.5"], "crop must be above 0 and at most 1, but it is 1.5"),
        (["--elsewhere", "2"], "elsewhere must be from 0 to 1, but it is 2.0"),
        (["--colour", "-1"], "colour must be at least 0, but it is -1.0"),
        (["--channels", "1,2"], "channels must be 6 whole numbers"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        synthetic.main([str(tmp_path / "new"), "--pictures", "4", *arguments])
