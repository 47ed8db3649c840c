"""Tables of functions, whose coefficients are Taylor's at each node, rounded once."""

import pytest
import torch
from mpmath import mp

from samebits.numerics.exact import tables

SLOPES = {
    "erf_of_positive": (mp.erf, lambda x: 2 / mp.sqrt(mp.pi) * mp.exp(-x * x)),
    "normal_cdf": (mp.ncdf, mp.npdf),
    "gelu_slope": (lambda x: mp.ncdf(x) + x * mp.npdf(x), lambda x: (2 - x * x) * mp.npdf(x)),
}


@pytest.mark.parametrize("name", SLOPES)
def test_coefficients_are_the_nearest_numbers_to_taylors(name):
    table, (value, slope) = getattr(tables, name), SLOPES[name]
    found = table.interleaved(torch.device("cpu")).tolist()
    low, high = table._low, table._high
    assert len(found) == (high - low) * 128 + 1
    with mp.workdps(60):
        for node in range(0, len(found), 7):
            x = mp.mpf(low) + mp.mpf(node) / 128
            of_slope = mp.taylor(slope, x, 2)
            assert found[node] == [float(c) for c in (value(x), *(c / (n + 1) for n, c in enumerate(of_slope)))]
