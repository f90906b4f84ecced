"""The rounding of benchmarks/precision.py, on which a claim about TF32 rests."""

import pytest
import torch
from torch.nn import functional as F

import precision


def test_numbers_keep_ten_bits():
    x = torch.tensor([1 + 2**-10, 1 + 2**-12, -3.0, 0.0])
    assert precision.rounded(x).tolist() == [1 + 2**-10, 1, -3, 0]


def test_a_convolution_and_its_gradients_are_those_of_rounded_factors():
    chance = torch.Generator().manual_seed(0)
    x, w, g = (
        torch.randn(*shape, generator=chance, dtype=torch.float32)
        for shape in ((2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 4, 4))
    )
    asked = [part.clone().requires_grad_() for part in (x, w)]
    exact = [precision.rounded(part).requires_grad_() for part in (x, w)]
    ours = precision.rounding(*asked, None, (2, 2), (1, 1), (1, 1), 1)
    theirs = F.conv2d(*exact, None, 2, 1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    found = torch.autograd.grad(ours, asked, g)
    expected = torch.autograd.grad(theirs, exact, precision.rounded(g))
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(
        found[1], torch.autograd.grad(F.conv2d(*exact, None, 2, 1), exact, g)[1], rtol=1e-6, atol=0
    )
    with pytest.raises(ValueError, match="only convolutions without bias"):
        precision.rounding(*asked, torch.zeros(4), (2, 2), (1, 1), (1, 1), 1)
