import math

import pytest
import torch

from pecil.teachers import scenes
from pecil.teachers.scenes import (
    BLOB,
    CAPSULE,
    FAMILIES,
    FLAT,
    GRADIENT,
    GRAIN,
    GRATING,
    LATTICES,
    MOST,
    POLYGON,
    RING,
    SHADED,
    Scenes,
    draw,
    main,
    render,
)


def one(**changes):
    """Return a scene: white on black, one plain disc in the middle unless changed."""
    plain = {
        "centre": torch.tensor([[[0.5, 0.5]]]),
        "radius": torch.tensor([[0.25]]),
        "squash": torch.ones(1, 1),
        "angle": torch.zeros(1, 1),
        "shape": torch.full((1, 1), BLOB),
        "waves": torch.tensor([[[0.0, 4.0, 0.0]]]),
        "paint": torch.full((1, 1), FLAT),
        "colours": torch.tensor([[[[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]]]),
        "texture": torch.zeros(1, 1, 3),
        "lamp": torch.tensor([[[0.0, 0.0, 1.0]]]),
        "grain": torch.full((1, 1, sum(points**2 for points in LATTICES)), 0.5),
    }
    return Scenes(**plain | changes)


def area(side=64, **changes):
    """Return the share of the picture that a white shape covers."""
    return float(render(one(**changes), side)[0].mean())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, math.pi / 16),
        ({"squash": torch.full((1, 1), 2.0)}, math.pi / 32),
        ({"shape": torch.full((1, 1), POLYGON)}, 2 * 0.25**2),
        ({"shape": torch.full((1, 1), RING)}, math.pi / 16 * (1 - 0.4**2)),
        (
            {"shape": torch.full((1, 1), CAPSULE), "squash": torch.full((1, 1), 2.5)},
            math.pi * 0.01 + 0.2 * 0.3,
        ),
    ],
)
def test_shapes_have_their_areas(changes, expected):
    assert area(**changes) == pytest.approx(expected, rel=0.04)


def test_shapes_turn_and_move():
    still = render(one(squash=torch.full((1, 1), 3.0)), 33)[0]
    turned = render(one(squash=torch.full((1, 1), 3.0), angle=torch.full((1, 1), math.pi / 2)), 33)[
        0
    ]
    torch.testing.assert_close(turned, still.transpose(2, 3), rtol=0, atol=1e-4)
    moved = render(one(centre=torch.tensor([[[0.25, 0.5]]])), 32)[0]
    assert moved[0, 0, :, :16].sum() > 5 * moved[0, 0, :, 16:].sum()


def test_a_blob_has_waves():
    waves = torch.tensor([[[0.3, 3.0, 0.0]]])
    made = render(one(waves=waves), 65)[0][0, 0] > 0.5
    across = made[32].float()
    right, left = across[32:].sum(), across[:33].sum()
    assert right / left == pytest.approx(1.3 / 0.7, rel=0.15)


@pytest.mark.parametrize("paint", [GRADIENT, GRATING, GRAIN, SHADED])
def test_paints_mix_two_colours(paint):
    texture = torch.tensor([[[4.0, 0.0, 0.0]]])
    wide = {"radius": torch.full((1, 1), 0.8), "texture": texture}
    grain = torch.rand(1, 1, sum(points**2 for points in LATTICES))
    made = render(one(paint=torch.full((1, 1), paint), grain=grain, **wide), 32)[0]
    assert made.min() >= 0 and made.max() <= 1 and made.std() > 0.05
    rows, columns = made[0, 0].std(0).mean(), made[0, 0].std(1).mean()
    if paint in (GRADIENT, GRATING):  # along x alone
        assert rows < 1e-5 < 0.1 < columns
    if paint == GRATING:
        crossings = (made[0, 0, 0] > 0.5).int().diff().abs().sum()
        assert crossings in (7, 8)  # four waves


def test_light_comes_from_the_lamp():
    lamp = torch.tensor([[[0.8, 0.0, 0.6]]])
    given = {"paint": torch.full((1, 1), SHADED), "lamp": lamp}
    colours = torch.tensor([[[[0.0] * 3, [1.0] * 3]]])
    made = render(one(colours=colours, **given), 32)[0][0, 0]
    assert made[:, 18:22].mean() > 1.3 * made[:, 10:14].mean()
    turned = render(one(colours=colours, angle=torch.full((1, 1), 1.0), **given), 32)[0][0, 0]
    torch.testing.assert_close(turned, made, rtol=0, atol=1e-4)  # a round thing may be turned


def test_later_layers_hide_earlier_ones_and_one_knows_which_is_seen():
    small = one(radius=torch.full((1, 1), 0.1), colours=torch.tensor([[[[0.2] * 3, [0.0] * 3]]]))
    both = one().under(small)
    pictures, seen = render(both, 32)
    assert both.layers == 2
    assert float(pictures[0, 0, 16, 16]) == pytest.approx(0.2) and int(seen[0, 16, 16]) == 1
    assert float(pictures[0, 0, 16, 22]) == 1 and int(seen[0, 16, 22]) == 0


def test_traits_tell_what_a_layer_is():
    angle = torch.full((1, 1), math.pi / 4)
    scene = one(shape=torch.full((1, 1), RING), squash=torch.full((1, 1), 2.0), angle=angle)
    expected = torch.tensor([RING, FLAT, 0.0, 0.5, math.log(0.25)])
    assert scene.traits.shape == (1, MOST, 5)
    torch.testing.assert_close(scene.traits[0, 0], expected, rtol=0, atol=1e-6)
    assert not scene.traits[0, 1:].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_draw_lively_pictures_that_the_seed_decides(family):
    drawn = draw({family: 1}, 12, seed=1, side=32)
    assert drawn.pictures.shape == (12, 3, 32, 32) and drawn.pictures.dtype == torch.uint8
    assert drawn.seen.shape == (12, 32, 32) and int(drawn.seen.max()) < MOST
    assert drawn.traits.isfinite().all()
    values = drawn.pictures.float()
    assert values.std((1, 2, 3)).min() > 3 and 60 < values.mean() < 190
    assert (values - values.mean(1, keepdim=True)).abs().mean() > 2  # they have colours
    again = draw({family: 1}, 12, seed=1, side=32)
    other = draw({family: 1}, 12, seed=2, side=32)
    assert torch.equal(drawn.pictures, again.pictures)
    assert not torch.equal(drawn.pictures, other.pictures)


@pytest.mark.parametrize("family", FAMILIES)
def test_elsewhere_the_same_things_are_in_the_surroundings_of_the_scene_before(family):
    behind = FAMILIES[family].behind
    here = FAMILIES[family].draw(5, torch.Generator().manual_seed(0))
    there = here.elsewhere(behind)
    assert 0 < behind < here.layers
    for name in ("centre", "radius", "colours", "paint"):
        mine, other = getattr(here, name), getattr(there, name)
        assert torch.equal(other[:, behind:], mine[:, behind:])
        assert torch.equal(other[:, :behind], mine.roll(1, 0)[:, :behind])
    assert torch.equal(there.lamp, here.lamp.roll(1, 0))


def test_other_looks_at_the_same_scenes_have_the_same_places():
    plain, other = (
        draw({"solids": 1, "glyphs": 1}, 12, side=32, elsewhere=where) for where in (False, True)
    )
    assert torch.equal((plain.traits[:, :, 4] != 0).sum(1), (other.traits[:, :, 4] != 0).sum(1))
    differ = (other.pictures.float() - plain.pictures.float()).abs().mean((1, 2, 3))
    across = (other.pictures.float() - plain.pictures.roll(1, 0).float()).abs().mean((1, 2, 3))
    assert (differ > 1).all() and differ.mean() < across.mean()
    assert torch.equal(other.traits[:, 11:], plain.traits[:, 11:])


def test_pictures_do_not_depend_on_how_many_are_made_at_a_time(monkeypatch):
    whole = draw({"leaves": 1}, 10, side=16)
    monkeypatch.setitem(scenes.MADE, "cpu", 3)
    parts = draw({"leaves": 1}, 10, side=16)
    assert torch.equal(whole.pictures, parts.pictures) and torch.equal(whole.seen, parts.seen)
    assert torch.equal(whole.traits, parts.traits)


def test_shares_say_how_many_of_each():
    drawn = draw({"gradients": 1, "leaves": 3, "glyphs": 0}, 16, side=8)
    layers = (drawn.traits[:, :, 4] != 0).sum(1)
    assert sorted(layers.tolist()) == [7] * 4 + [61] * 12
    assert layers.tolist() != sorted(layers.tolist())  # in random order


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"cats": 1}, "families out of leaves, .*glyphs, got 'cats'"),
        ({"leaves": -1}, "share of leaves must be a number from 0, but it is -1"),
        ({"leaves": 0}, "share of some family, got {'leaves': 0}"),
        ({}, "share of some family, got {}"),
    ],
)
def test_wrong_shares_are_refused(shares, message):
    with pytest.raises(ValueError, match=message):
        draw(shares, 1)


def test_a_contact_sheet(tmp_path):
    path = tmp_path / "sheet.png"
    main([str(path), "--families", "leaves", "strokes", "--columns", "2", "--side", "16"])
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="families out of .*, got 'cats'"):
        main([str(tmp_path / "other.png"), "--families", "cats"])
    assert [file.name for file in tmp_path.iterdir()] == ["sheet.png"]
