"""Synthetic pictures: of the size and contrast that teachers expect, the same everywhere."""

import pytest
import torch

from pecil.teachers.pictures import dead_leaves, strokes

painters = pytest.mark.parametrize("paint", [dead_leaves, strokes])


def painted(paint, n=60, channels=3, seed=0):
    return paint(n, channels, torch.Generator().manual_seed(seed))


@painters
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_have_mean_0_and_deviation_1(paint, channels):
    pictures = painted(paint, channels=channels)
    assert pictures.shape == (60, channels, 32, 32) and pictures.dtype == torch.float32
    assert abs(pictures.mean()) < 0.35
    assert 0.8 < pictures.std() < 1.2
    assert pictures.abs().max() < 4


@painters
def test_the_generator_decides(paint):
    pictures = painted(paint, n=8)
    assert torch.equal(painted(paint, n=8), pictures)
    other = painted(paint, n=8, seed=1)
    assert (other != pictures).flatten(1).float().mean(1).min() > 0.1  # each of them differs


@painters
def test_no_other_random_numbers_are_used(paint):
    before = torch.get_rng_state()
    painted(paint, n=2)
    assert torch.equal(torch.get_rng_state(), before)


@painters
def test_no_two_pictures_are_alike(paint):
    pictures = painted(paint, n=12).flatten(1)
    apart = torch.cdist(pictures, pictures) + 1e3 * torch.eye(12)
    assert apart.min() > 10


def test_leaves_have_edges_flat_parts_and_some_colour():
    pictures = painted(dead_leaves)
    step = pictures.diff(dim=3).abs()
    assert (step < 0.15).float().mean() > 0.4  # within a leaf
    assert (step > 0.5).float().mean() > 0.05  # from one to another
    channels = pictures.transpose(0, 1).flatten(1).corrcoef()
    assert 0.6 < channels[0, 1] < 0.95


def test_strokes_are_thin_bright_and_grey():
    pictures = painted(strokes)
    assert torch.equal(pictures[:, 0], pictures[:, 2])
    low, high = pictures.amin(), pictures.amax((1, 2, 3))
    assert (high > 2.5).all()  # each has ink
    assert (pictures < low + 0.05).float().mean() > 0.6  # and plain ground
    ink = (pictures > 1).float().mean((1, 2, 3))
    assert ink.min() > 0.03 and ink.max() < 0.35
