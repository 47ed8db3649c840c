"""A convolution by a CPU's float64 kernels and by a product of its windows, as on a GPU, is one function."""

import itertools

import pytest
import torch

from samebits.numerics.exact import convolution
from samebits.numerics.exact.compiled.library import using
from samebits.numerics.exact.operations import EXACT
from samebits.numerics.exact.self_test.numbers import integers
from samebits.numerics.exact.unfolding import Geometry, fold

aten = torch.ops.aten
SIZE, CHANNELS, OUTPUTS, SAMPLES = (7, 6, 5), 4, 8, 3
GEOMETRIES = [*itertools.product((1, 2, 4), (1, 2), (0, 1), (1, 2), (False, True), (1, 3))]


def numbers(*shape, salt):
    """Numbers from -2 to 2, of one size, so that the error of a sum is small beside the largest sum."""
    drawn = integers(torch.Size(shape).numel(), 22, salt, torch.device("cpu"))
    return drawn.mul_(2.0**-20).sub_(2.0).to(torch.float32).view(shape)


def passes(dims, groups, stride, padding, dilation, transposed, kernel):
    """The result and the three gradients, in exact, and in float64 from the same numbers."""
    sides = (CHANNELS, OUTPUTS // groups) if transposed else (OUTPUTS, CHANNELS // groups)
    x, weight = numbers(SAMPLES, CHANNELS, *SIZE[:dims], salt=1), numbers(*sides, *(kernel,) * dims, salt=2)
    bias = numbers(OUTPUTS, salt=3)
    moves = [[stride] * dims, [padding] * dims, [dilation] * dims, transposed, [0] * dims, groups]
    y = EXACT[aten.convolution](x, weight, bias, *moves)
    grad, wanted = numbers(*y.shape, salt=4), [True, True, True]
    back = EXACT[aten.convolution_backward](grad, x, weight, [OUTPUTS], *moves, wanted)
    x, weight, bias, grad = (t.double() for t in (x, weight, bias, grad))
    near = aten.convolution(x, weight, bias, *moves)
    return [y, *back], [near, *aten.convolution_backward(grad, x, weight, [OUTPUTS], *moves, wanted)]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_convolution_is_that_of_its_windows(dims, monkeypatch):
    for geometry in GEOMETRIES:
        native, near = passes(dims, *geometry)
        with monkeypatch.context() as patch:
            patch.setattr(convolution, "_is_native", lambda _: False)
            with using(None):
                unfolded, _ = passes(dims, *geometry)
        for one, other, true in zip(native, unfolded, near, strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32)), geometry
            assert (one.double() - true).abs().max() <= 3e-6 * true.abs().max(), geometry


def test_the_gradient_of_a_window_far_larger_than_its_image_costs_what_the_image_does():
    """One window of 25 million places, as of an average pooling that is wide enough for every image."""
    geometry = Geometry.of((2, 3), kernel=5000, stride=5000, padding=0, dilation=1, ceil=True)
    share = torch.tensor([[[[0.5]], [[-1.0]]]], dtype=torch.float64)
    found = fold(share.view(*share.shape, 1, 1).expand(1, 2, 1, 1, 5000, 5000), geometry)
    assert torch.equal(found, share.expand(1, 2, 2, 3))
