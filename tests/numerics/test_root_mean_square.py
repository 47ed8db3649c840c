"""RMSNorm in exact: near PyTorch's float64, and the same for rows of any shape."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.forms import FORMS
from samebits.numerics.exact.self_test.numbers import usual_floats


def exact(x, shape, weight, eps, grad):
    """The norm, and its gradients for the numbers and the weight."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    with Engine():
        y = FORMS[F.rms_norm](x, shape, weight, eps)
        y.backward(grad)
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("shape", [(5,), (7, 5)])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_it_is_near_the_true_one(shape, eps):
    x, grad = (usual_floats(420, salt, torch.device("cpu")).view(12, 7, 5) for salt in (1, 2))
    weight = usual_floats(35, 3, torch.device("cpu"))[: torch.Size(shape).numel()].view(shape)
    found = exact(x, shape, weight, eps, grad)
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = F.rms_norm(x, shape, weight, torch.finfo(torch.float32).eps if eps is None else eps)
    y.backward(grad.double())
    for one, true in zip(found, (y, x.grad, weight.grad), strict=True):
        assert (one - true).abs().max() < 4e-7 * true.abs().max()


def test_rows_have_the_same_bits_by_themselves():
    x, grad = (usual_floats(64, salt, torch.device("cpu")).view(8, 8) for salt in (4, 5))
    y, slopes, _ = exact(x, (8,), torch.ones(8), None, grad)
    for row in range(8):
        one, of_one, _ = exact(x[row], (8,), torch.ones(8), None, grad[row])
        assert torch.equal(one, y[row])
        assert torch.equal(of_one, slopes[row])


def test_a_shape_that_does_not_fit_is_pytorchs_own_error():
    with pytest.raises(RuntimeError, match="normalized_shape"):
        FORMS[F.rms_norm](torch.ones(2, 3), (4,))
    assert nn.RMSNorm(3)(torch.ones(2, 3)).shape == (2, 3)
