"""Recurrent layers and cells in the exact numerics, beside PyTorch's own in float64."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from samebits.errors import RefusedError
from samebits.numerics.exact.batch_norm import ShardNorms
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.forms import OneForm
from samebits.numerics.exact.forward_draws import Draws
from samebits.portable.random import Stream

STEPS, SAMPLES, WIDTH = 5, 7, 6
LENGTHS = torch.tensor([3, 5, 1, 2, 5, 4, 4])


def sequences():
    numbers = Stream(3, "sequences").normal(STEPS * SAMPLES * WIDTH)
    return torch.from_numpy(numbers).float().view(STEPS, SAMPLES, WIDTH).requires_grad_()


def filled(module):
    for number, parameter in enumerate(module.parameters()):
        values = Stream(number, "weights").normal(parameter.numel())
        parameter.data = torch.from_numpy(values).to(parameter.dtype).mul_(0.4).float().view(parameter.shape)
    return module


def states_of(after):
    return after if isinstance(after, tuple) else (after,)


def padded(module, x):
    output, after = module(x)
    return [output, *states_of(after)]


def packed(module, x):
    output, after = module(pack_padded_sequence(x, LENGTHS, enforce_sorted=False))
    return [pad_packed_sequence(output, total_length=STEPS + 1)[0], *states_of(after)]


def alone(module, x):
    return padded(module, x[:, 0])


def given(module, x):
    """The last states go in again."""
    return padded(lambda y: module(y, module(x)[1]), x)


def by_cell(module, x):
    state = None
    for step in x:
        state = module(step, state)
    return states_of(state)


def alone_by_cell(module, x):
    return by_cell(module, x[:, 0])


LAYERS = {
    "lstm": (nn.LSTM, {}),
    "lstm both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "lstm projected": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 3}),
    "lstm without bias": (nn.LSTM, {"bias": False}),
    "gru": (nn.GRU, {"num_layers": 2}),
    "gru both ways": (nn.GRU, {"bidirectional": True, "bias": False}),
    "tanh": (nn.RNN, {"bidirectional": True}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
CELLS = {
    "lstm": (nn.LSTMCell, {}),
    "lstm without bias": (nn.LSTMCell, {"bias": False}),
    "gru": (nn.GRUCell, {}),
    "tanh": (nn.RNNCell, {}),
    "relu": (nn.RNNCell, {"nonlinearity": "relu"}),
}
CASES = [
    *((way, *LAYERS[name]) for name in LAYERS for way in (padded, packed, alone, given)),
    *((padded, kind, {"batch_first": True}) for kind in (nn.LSTM, nn.GRU)),
    *((way, *CELLS[name]) for name in CELLS for way in (by_cell, alone_by_cell)),
]


def results(module, way, x, forward, backward):
    """The outputs, and the gradients of a function of them for the input and all parameters."""
    with forward:
        outputs = way(module, x)
        total = sum((number + 2) * output.sin().sum() for number, output in enumerate(outputs))
    with backward:
        grads = torch.autograd.grad(total, [x, *module.parameters()])
    return [*(output.detach() for output in outputs), *grads]


class Both:
    """The modes of an exact forward pass."""

    def __init__(self, module):
        self.engine = Engine(Draws(0, 0, [0]))
        self.form = OneForm(self.engine, ShardNorms(module, self.engine))

    def __enter__(self):
        self.engine.__enter__()
        self.form.__enter__()

    def __exit__(self, *exception):
        self.form.__exit__(*exception)
        self.engine.__exit__(*exception)


@pytest.mark.parametrize(("way", "kind", "settings"), CASES)
def test_it_is_what_pytorch_computes_in_float64(way, kind, settings):
    module = filled(kind(WIDTH, 4, **settings))
    exact = results(module, way, sequences(), Both(module), Engine())
    wide = copy.deepcopy(module).double()
    true = results(wide, way, sequences().detach().double().requires_grad_(), torch.enable_grad(), torch.enable_grad())
    for got, expected in zip(exact, true, strict=True):
        assert got.dtype == torch.float32
        assert (got - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_a_cell_takes_the_names_of_pytorch():
    module, x, state = filled(nn.GRUCell(WIDTH, 4)), sequences()[0].detach(), torch.ones(SAMPLES, 4)
    weights = {name.replace("weight", "w").replace("bias", "b"): value for name, value in module.named_parameters()}
    with torch.no_grad(), Both(module):
        assert torch.equal(torch.gru_cell(hx=state, input=x, **weights), module(x, state))


def test_samples_of_a_batch_do_not_change_each_other():
    """Nor does the order in which packed samples come, or how many there are."""
    module, x = filled(nn.LSTM(WIDTH, 4, bidirectional=True)), sequences()
    with torch.no_grad(), Both(module):
        whole = packed(module, x)[0]
        order = random.Random(1).sample(range(SAMPLES), SAMPLES)
        for number, sample in enumerate(order):
            few, _ = module(pack_padded_sequence(x[:, order[number:]], LENGTHS[order[number:]], enforce_sorted=False))
            output, _ = pad_packed_sequence(few, total_length=STEPS + 1)
            assert torch.equal(output[:, 0], whole[:, sample])


def test_other_types_and_no_steps_are_refused():
    module = nn.GRU(WIDTH, 4)
    with Both(module):
        with pytest.raises(RefusedError, match=r"a sequence has no steps, expected at least one"):
            module(sequences()[:0])
        with pytest.raises(RefusedError, match=r"torch.float64 has no exact version"):
            torch.gru_cell(sequences()[0].double(), torch.zeros(SAMPLES, 4), *module.parameters())
