"""Several shards in one pass have the bits that each has alone."""

import pytest
import torch
from torch import nn
from torch.distributions import Exponential, Laplace
from torch.nn import functional as F

import exact_probe
from samebits.errors import RefusedError
from samebits.numerics.exact import of_shards, together
from samebits.numerics.exact.batch_norm import ShardNorms
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.forms import OneForm
from samebits.numerics.exact.forward_draws import Draws
from samebits.numerics.exact.of_shards import FORMS as OF_SHARDS
from samebits.numerics.exact.windows import LOSS, Windows
from samebits.training.diagnosis import require_same_again
from test_exact_models import MODELS, SHARDS, STEPS, Does, classes, exact, images, prepared


def at_once(x):
    return torch._C._functorch.is_batchedtensor(x)


def trained(factory, inputs, targets, *, at_once):
    """Hash and losses of a training, and why its shards ran apart."""
    x, y = inputs(), targets()
    numerics = exact(y.shape[1:])
    if at_once:
        numerics.apart = None
    found = exact_probe.run(numerics, factory, x, y, shards=SHARDS, splits=1, steps=STEPS)
    return found, numerics.apart


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_bits_of_their_shards_alone(name):
    alone, _ = trained(*MODELS[name], at_once=False)
    found, apart = trained(*MODELS[name], at_once=True)
    assert found == alone
    assert (apart is None) == (name != "recurrent"), apart


class Net(nn.Module):
    """A layer, and what a test does with its outputs."""

    def __init__(self, what):
        super().__init__()
        self.what, self.body = what, nn.Linear(192, 20)

    def forward(self, x):
        return self.what(self, x.flatten(1))


WRITTEN = [
    lambda net, x: net.body(x).add_(F.linear(x.view(2, -1, 192), net.body.weight).mul_(2).mean(1).sum(0)),
    lambda net, x: net.body(x) + F.conv1d(x.unsqueeze(1), net.body.weight.unsqueeze(1)).mul_(2)[..., 0],
    lambda net, x: (
        net.body(x) + F.embedding((x[:, :3] > 0).long(), net.body.weight).mul_(x[:, :3, None]).sum(1)[:, :20]
    ),
]
"""Results that are written to."""


def halves(x):
    return x.view(-1, 2, 96)


PRODUCTS = [
    lambda net, x: (halves(x) @ net.body.weight[:, :96].T @ torch.ones(20, 20)).sum(1) + net.body.bias,
    lambda net, x: (net.body.weight[:, :96] @ halves(x).mT).sum(2) + net.body.bias,
    lambda net, x: halves(x).matmul(net.body.weight[0, :96]).sum(1, keepdim=True) + net.body(x),
    lambda net, x: torch.matmul(net.body.weight[0, :96], halves(x).mT).sum(1, keepdim=True) + net.body(x),
    lambda net, x: (halves(x) @ (halves(x)[0].T @ net.body.weight[:2, :20])).sum(1) + net.body.bias,
    lambda net, x: torch.addmm(net.body.bias, x, net.body.weight.T, beta=0.3, alpha=0.7),
    lambda net, x: net.body.bias.expand(len(x), 20).addmm(mat2=net.body.weight.T, mat1=x, alpha=0.7),
    lambda net, x: net.body.bias.baddbmm(
        halves(x), net.body.weight[:, :96].T.expand(len(x), 96, 20), beta=1.3, alpha=0.7
    ).sum(1),
    lambda net, x: net.body(x) + torch.addmv(net.body.bias, net.body.weight, x[0], beta=0.1, alpha=0.7),
    lambda net, x: (
        net.body(x)
        + torch.addbmm(
            net.body.bias, halves(x), net.body.weight[:, :96].T.expand(len(x), 96, 20), beta=0, alpha=0.7
        ).sum(0)
    ),
    lambda net, x: net.body(x) + torch.addr(net.body.bias, x[0, :1], net.body.weight[:, 0], alpha=0.7),
    lambda net, x: net.body(x) + torch.addr(net.body.bias, net.body.weight[0, :1], x[0, :20], beta=2),
    lambda net, x: (
        net.body(x) + torch.addmm(torch.ones(3, 3).long(), torch.eye(3).long(), torch.eye(3).long(), alpha=2).sum()
    ),
]
"""Products whose gradients PyTorch takes apart in another way under ``vmap``."""


@pytest.mark.parametrize(
    "what",
    [
        lambda net, x: net.body(x) - net.body(x).mean(0),  # of the shard
        lambda net, x: net.body(x.roll(1, 0)) / x.shape[0],
        lambda net, x: net.body(x) + F.linear(x, net.body.weight[0]).unsqueeze(1),  # a weight of one axis
        lambda net, x: F.linear(x, net.body.weight * x.std(), net.body.bias),  # other weights for each shard
        lambda net, x: net.body(x) + net.body.weight[:, [0, 1, 0, 1]].sum(1),  # places that meet
        lambda net, x: net.body(x) + x @ net.body.weight.T + net.body.weight.sum(1),  # three uses
        lambda net, x: net.body(x).index_add(1, torch.tensor([0, 0, 3]), x[:, :3] * 1e6),
        lambda net, x: net.body(F.dropout(x, 0.5)) * torch.rand(20) + torch.randn_like(x[:, :1]),
        lambda net, x: net.body(x) * torch.empty(len(x), 1).bernoulli_(0.5) + x.new_empty(20).uniform_(-1.0, 1.0),
        lambda net, x: net.body(x) * torch.empty_like(net.body.bias).normal_() + torch.empty(20).copy_(x[0, :20]),
        lambda net, x: net.body(x) + torch.multinomial(x.abs() + 0.1, 20).float(),
        lambda net, x: net.body(x * x.sigmoid().bernoulli()) + torch.normal(x[:, :20], x[:, :20].abs()),
        lambda net, x: net.body(x * torch.empty_like(x).bernoulli_(x.sigmoid())) + torch.normal(x[:, :1], 0.5),
        lambda net, x: net.body(x + Laplace(x, x.abs() + 1).rsample()) * Exponential(x[:, :1].abs() + 1).sample(),
        lambda net, x: net.body(x[torch.randperm(len(x))]) + x.new([1.0, 2.0] * 10) * x.new(20).fill_(3).add_(x[0, 0]),
        lambda net, x: (
            F.conv1d(x.view(1, len(x), -1), net.body.weight[: len(x) * 2, None, :3], groups=len(x)).mean() + net.body(x)
        ),
        *WRITTEN,
        *PRODUCTS,
    ],
)
def test_each_shard_has_its_own_bits_whatever_the_model_does_with_them(what):
    alone, _ = trained(lambda: Net(what), images, classes, at_once=False)
    found, apart = trained(lambda: Net(what), images, classes, at_once=True)
    assert apart is None
    assert found == alone


class Normed(nn.Module):
    """A layer whose weight is computed before each of its calls, and may be read before that."""

    def __init__(self, early=False):
        super().__init__()
        self.body, self.early = torch.nn.utils.weight_norm(nn.Linear(192, 20)), early

    def forward(self, x):
        scale = self.body.weight.sum() if self.early else 1.0
        return self.body(x.flatten(1)) * scale


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weights_that_pytorch_computes_before_each_call_are_no_state():
    alone, _ = trained(Normed, images, classes, at_once=False)
    found, apart = trained(Normed, images, classes, at_once=True)
    assert (found, apart) == (alone, None)
    with pytest.raises(AttributeError, match="no attribute 'weight'"):  # else it would be that of an earlier pass
        trained(lambda: Normed(early=True), images, classes, at_once=False)


class Sequences(nn.Module):
    """Recurrent layers and cells of padded samples; with ``scaled`` the weights differ between shards."""

    def __init__(self, scaled=False):
        super().__init__()
        self.scaled = scaled
        self.both = nn.LSTM(8, 12, num_layers=2, bidirectional=True, batch_first=True, proj_size=6, dropout=0.2)
        self.gru, self.plain = nn.GRU(12, 10, bias=False), nn.RNN(10, 9, nonlinearity="relu")
        self.cell, self.last, self.head = nn.LSTMCell(9, 7), nn.GRUCell(9, 7), nn.Linear(7, 20)

    def forward(self, x):
        x = x.flatten(1)[:, :40].view(-1, 5, 8)
        x, _ = self.both(x, None)
        x, _ = self.gru(x.transpose(0, 1))
        x, last = self.plain(x)
        h, c = self.cell(x[-1] * x.std() if self.scaled else x[-1])
        weight = self.last.weight_hh * (1 + h.mean() if self.scaled else 1)
        weights = self.last.weight_ih, weight, self.last.bias_ih, self.last.bias_hh
        return self.head(torch.gru_cell(last[0], h, *weights) + c)


@pytest.mark.parametrize("scaled", [False, True])
def test_recurrent_layers_have_the_bits_of_their_shards_alone(scaled):
    alone, _ = trained(lambda: Sequences(scaled), images, classes, at_once=False)
    found, apart = trained(lambda: Sequences(scaled), images, classes, at_once=True)
    assert apart is None
    assert found == alone


ROWS, WEIGHT = torch.linspace(-2, 2, 24).view(2, 3, 4), torch.linspace(0.5, 1.5, 4)
NAMED = {
    F.bilinear: {"input1": ROWS, "input2": ROWS, "weight": torch.ones(2, 4, 4)},
    F.binary_cross_entropy: {"input": WEIGHT / 2, "target": WEIGHT / 3},
    F.binary_cross_entropy_with_logits: {"input": ROWS, "target": ROWS.sigmoid(), "pos_weight": WEIGHT},
    F.conv1d: {"input": ROWS, "weight": torch.ones(2, 3, 2), "padding": 1},
    F.embedding: {"input": torch.tensor([1, 0]), "weight": ROWS[0]},
    F.grid_sample: {"input": ROWS[None], "grid": ROWS[:1, None, :, :2], "align_corners": False},
    F.group_norm: {"input": ROWS, "num_groups": 3, "weight": WEIGHT[:3]},
    F.instance_norm: {"input": ROWS, "weight": WEIGHT[:3]},
    F.layer_norm: {"input": ROWS, "normalized_shape": (4,), "weight": WEIGHT},
    F.linear: {"input": ROWS, "weight": torch.ones(2, 4)},
    F.rms_norm: {"input": ROWS, "normalized_shape": (4,), "weight": WEIGHT},
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("function", NAMED, ids=lambda function: function.__name__)
def test_functions_take_their_arguments_by_name(function, together):
    engine = Engine(Draws(0, 0, [0]))
    with engine, OneForm(engine, ShardNorms(nn.Module(), engine), together=torch.empty(0) if together else None):
        found = function(**NAMED[function])
    torch.testing.assert_close(found, function(**NAMED[function]))


def test_weights_that_leave_no_room_for_a_gradient_of_each_shard_run_in_several_passes(monkeypatch):
    alone, _ = trained(*MODELS["decoder"], at_once=False)
    monkeypatch.setattr(together, "_MOST", 2 * 1024)
    values = {"weight": torch.zeros(1024)}
    assert list(together.passes(range(3, 8), values)) == [range(3, 5), range(5, 7), range(7, 8)]
    found, apart = trained(*MODELS["decoder"], at_once=True)
    assert (found, apart) == (alone, None)


def looked_up(net, x):
    """Rows of the layer's weight, fewer than there are, of which some meet; as wide as its outputs."""
    index = (x[:, :2] * 40).long().remainder(18)
    return F.embedding(index, net.body.weight, padding_idx=3).sum(1)[:, :20]


@pytest.mark.parametrize(
    ("what", "summed"),
    [
        (lambda net, x: net.body(x), True),
        (lambda net, x: looked_up(net, x), True),
        (lambda net, x: net.body(x) + net.body(x.roll(1, 0)), False),
        (lambda net, x: net.body(x) + net.body.weight.sum(1), False),
        (lambda net, x: looked_up(net, x) + net.body.weight.sum(1), False),
        (lambda net, x: F.linear(x, net.body.weight * 2), False),
    ],
)
def test_gradients_of_a_weight_that_is_used_once_are_summed_as_they_come(what, summed, monkeypatch):
    calls = []
    for name in ("sum_of_products", "_sum_of_rows"):
        function = getattr(of_shards, name)
        monkeypatch.setattr(of_shards, name, lambda *args, f=function: calls.append(args) or f(*args))
    found, apart = trained(lambda: Net(what), images, classes, at_once=True)
    assert apart is None
    assert (len(calls) > 1) == summed  # once to find that there is another use
    monkeypatch.setattr(of_shards, "met", lambda _: None)
    assert trained(lambda: Net(what), images, classes, at_once=True)[0] == found


class Cancels(nn.Module):
    """A weight of which a second use takes away nearly all of the first one's gradient."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(192, 20)
        nn.init.zeros_(self.body.weight)

    def forward(self, x):
        x = x.flatten(1) * torch.linspace(0, 1, 192).pow(8)
        return self.body(x) - (1 - 2.0**-10) * (x @ self.body.weight.T)


def test_a_part_of_a_gradient_widens_no_window():
    alone, _ = trained(Cancels, images, classes, at_once=False)
    found, apart = trained(Cancels, images, classes, at_once=True)
    assert (found, apart) == (alone, None)


def test_a_model_is_tried_before_its_shards_run_in_one_pass():
    numerics, module, batch = prepared(Does())
    assert numerics.apart is not None
    require_same_again(numerics, module, batch)
    assert numerics.apart is None


class Asks(nn.Module):
    """A module of a model, of which a test calls a function of its input."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(x)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda x: x * (x.sum() > 0).tolist(), "it asks for a number of its data, as .item() does"),
        (lambda x: x + x[x > 0].mean(), "a shape depends on its data"),
        (lambda x: x + x.masked_select(x > 0).mean(), "a shape depends on its data"),
        (lambda x: x + x.nonzero().sum(), "a shape depends on its data"),
        (
            lambda x: x + torch.zeros(192).exponential_(),
            "it draws in place into a tensor that is not made of its inputs",
        ),
        (
            lambda x: x + torch.zeros(192).add_(x[0]),
            "it writes numbers of its inputs into a tensor that is not made of them",
        ),
        (
            lambda x: x * torch.func.grad(lambda y: y.square().sum())(x.detach().requires_grad_()),
            "it asks for a derivative in forward (requires_grad_)",
        ),
    ],
)
def test_a_model_that_cannot_run_all_shards_at_once_runs_them_one_by_one_and_says_why(what, why):
    model = nn.Sequential(nn.Flatten(), Asks(what), nn.Linear(192, 20))
    numerics, module, batch = prepared(model)
    require_same_again(numerics, module, batch)
    assert numerics.apart == f"model.1 (Asks): {why}"
    assert numerics.arithmetic().shards_apart == numerics.apart
    assert not numerics.windows.apart


def test_a_trial_without_room_for_all_shards_says_so():
    def large(x):
        return x + torch.empty(2**60).sum() if at_once(x) else x

    numerics, module, batch = prepared(nn.Sequential(nn.Flatten(), Asks(large), nn.Linear(192, 20)))
    require_same_again(numerics, module, batch)
    assert numerics.apart == "a trial of one pass ran out of memory"


def test_an_option_of_a_look_up_that_is_refused_is_refused_in_one_pass_too():
    def divided(net, x):
        return F.embedding((x[:, 0] > 0).long(), net.body.weight, scale_grad_by_freq=True)[:, :20]

    with pytest.raises(RefusedError, match="an embedding with scale_grad_by_freq"):
        trained(lambda: Net(divided), images, classes, at_once=True)


class Chooses(nn.Module):
    """A model that asks for a number of its data, and takes its way by it."""

    def __init__(self, ask):
        super().__init__()
        self.ask, self.ways, self.norm = ask, nn.ModuleList(nn.Linear(192, 20) for _ in range(3)), nn.BatchNorm1d(192)

    def forward(self, x):
        x = F.dropout(self.norm(x.flatten(1)), 0.25)
        way = self.ask(x)
        return self.ways[int(way)](x) + torch.randn_like(x[:, :1])


TOO_MANY = "its shards take almost as many ways through forward as there are shards"


@pytest.mark.parametrize(
    ("ask", "groups"),
    [
        (lambda x: (x.std() * 1000).long().item() % 3, False),
        (lambda x: ((x.std() * 1000).long() % 2).item(), True),
        (lambda x: 1 if x.sum() > 0 else 0, True),
        (lambda x: bool((x[0, 1] > 0).is_nonzero()), True),
        (lambda x: torch.is_nonzero(x[0, 1] > 0), True),
        (lambda x: int((x.sum() * 1000).round()) % 3, False),
        (lambda x: int(float((x.detach().sum() > 0).float())), True),
        (lambda x: [0, 1, 2][(x.sum() > 0).long()], True),
        (lambda x: 1 in (x[0, :2] > 0).long(), True),
        (lambda x: (x[0, 0] / (x[0, 1] > 0) * 0).item() > 0, True),  # NaN for some
    ],
)
def test_shards_that_answer_differently_go_on_in_groups(ask, groups, monkeypatch):
    alone, _ = trained(lambda: Chooses(ask), images, classes, at_once=False)
    numerics, module, batch = prepared(Chooses(ask))
    require_same_again(numerics, module, batch)
    assert numerics.apart == (None if groups else f"model (Chooses): {TOO_MANY}")
    run, passes = together.run, []
    monkeypatch.setattr(
        together,
        "run",
        lambda compute, entered, *more: (
            passes.append(len(next(iter(entered.values())))),
            run(compute, entered, *more),
        )[1],
    )
    found, apart = trained(lambda: Chooses(ask), images, classes, at_once=True)
    assert (found, apart) == (alone, numerics.apart)
    assert max(passes) == SHARDS
    assert (min(passes) < SHARDS) == groups


def test_a_number_that_is_put_where_a_mask_is_true_keeps_shards_in_one_pass():
    def what(net, x):
        y = net.square(x)
        y[y > 0.5] = 2.0
        y[x[:, 0] > 0] = -1
        y[0, 3] = 7.0
        return y + x.clone().index_put((torch.tensor([0]),), torch.ones(()))

    alone, _ = trained(lambda: Square(what), images, classes, at_once=False)
    assert trained(lambda: Square(what), images, classes, at_once=True) == (alone, None)


def test_more_than_one_number_is_none_in_one_pass_too():
    numerics, module, batch = prepared(nn.Sequential(nn.Flatten(), Asks(lambda x: x * x.item()), nn.Linear(192, 20)))
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        require_same_again(numerics, module, batch)


class Hooked(nn.Module):
    """A layer whose gradient a test changes on its way back."""

    def __init__(self, hook):
        super().__init__()
        self.body = nn.Linear(192, 20)
        if hook == "module":
            self.body.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))
        self.first, self.hook = nn.Linear(192, 192), hook

    def forward(self, x):
        x = self.first(x.flatten(1))
        if self.hook == "tensor" and x.requires_grad:
            x.register_hook(lambda grad: grad.clamp(-1e-6, 1e-6))
        return self.body(x)


@pytest.mark.parametrize("hook", ["module", "tensor"])
def test_a_hook_of_a_gradient_is_kept_by_running_shards_one_by_one(hook):
    numerics, module, batch = prepared(Hooked(hook))
    require_same_again(numerics, module, batch)
    assert numerics.apart is not None


def test_a_model_knows_in_one_pass_which_tensors_require_a_gradient():
    def doubled(net, x):
        y = net.body(x)
        return y * (2.0 if y.requires_grad else 1.0)

    alone, _ = trained(lambda: Net(doubled), images, classes, at_once=False)
    found, apart = trained(lambda: Net(doubled), images, classes, at_once=True)
    assert (found, apart) == (alone, None)


def test_a_trial_takes_no_more_shards_than_leave_room_for_their_gradients(monkeypatch):
    monkeypatch.setattr(together, "_MOST_TRIED", 3 * 1024)
    assert together.tried(range(4, 8), {"a": torch.zeros(1000), "b": torch.zeros(24)}) == range(4, 7)
    assert together.tried(range(4, 8), {"a": torch.zeros(4096)}) == range(4, 6)


@pytest.mark.parametrize("index", [-1, 8])
def test_a_look_up_beyond_an_embedding_is_an_error(index):
    with pytest.raises(IndexError):
        torch.func.vmap(lambda rows: OF_SHARDS[F.embedding](torch.tensor([index]), rows))(torch.ones(2, 8, 3))


def test_other_bits_in_one_pass_are_met_by_running_shards_one_by_one_on_all_ranks():
    numerics, module, batch = prepared(Does(lambda net, x: x * (2.0 if at_once(net.body.weight) else 1.0)))
    require_same_again(numerics, module, batch)
    assert numerics.windows.apart


def test_other_bits_after_steps_in_one_pass_are_refused():
    changes = []
    numerics, module, batch = prepared(Does(lambda net, x: x * (2.0 if changes and at_once(net.body.weight) else 1.0)))
    require_same_again(numerics, module, batch)
    assert numerics.apart is None
    changes.append(1)
    with pytest.raises(RefusedError, match="gives other bits in one pass than alone") as error:
        require_same_again(numerics, module, batch)
    assert "SAMEBITS_SHARDS to apart" in error.value.hint


def test_shards_run_one_by_one_if_the_environment_asks_for_it(monkeypatch):
    monkeypatch.setenv("SAMEBITS_SHARDS", "apart")
    numerics, module, batch = prepared(Does())
    require_same_again(numerics, module, batch)
    assert numerics.arithmetic().shards_apart == "SAMEBITS_SHARDS is set to apart"


def test_ranks_agree_to_run_shards_one_by_one():
    numerics, _, _ = prepared(Does())
    numerics.apart = None

    def told_by_another(values):
        values = values.clone()
        values[-2] = 1  # whether shards run apart
        return values

    assert not numerics.accepts_grads(told_by_another)  # so that the step runs again
    assert numerics.apart == "in one pass some have other bits than alone"


def test_windows_know_on_which_ranks_shards_run_apart():
    windows = Windows([LOSS])
    windows.apart = True
    assert not windows.settle(lambda values: values, torch.device("cpu"))  # on this rank as on the others
    assert windows.settle(lambda values: values, torch.device("cpu"))
    assert windows.apart


class Doubled(torch.autograd.Function):
    """A function of old form: in steps of 1/8 forward, as if it were not there backward."""

    @staticmethod
    def forward(ctx, x, weight, more):
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        noise = F.dropout(torch.ones_like(x), 0.5) + torch.rand(x.shape[1])
        if x.sum() > 0:
            noise = noise * 2
        noise = noise + F.linear(x.view(len(x), 1, -1), weight).sum(1) * 1e-3
        return (x * 8).round() / 8 * noise + F.linear(x, weight), x.detach().std() * more["scale"], more["scale"]

    @staticmethod
    def backward(ctx, grad, of_size, _):
        x, _ = ctx.saved_tensors
        return grad * x.mean() + (0 if of_size is None else of_size), grad.t() @ x, None


class WithSetup(torch.autograd.Function):
    """A function of new form without a rule for ``vmap``, one result and a tensor that all shards share."""

    @staticmethod
    def forward(x, shared):
        return x.sign() * shared

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        return torch.where(output < 0, grad * 0.25, grad), None


class Square(nn.Module):
    """A layer of as many outputs as inputs."""

    def __init__(self, what):
        super().__init__()
        self.what, self.square, self.head = what, nn.Linear(32, 32), nn.Linear(32, 20)

    def forward(self, x):
        return self.head(self.what(self, x.flatten(1)[:, :32]))


def of_old_form(net, x):
    y, size, scale = Doubled.apply(net.square(x), net.square.weight, {"scale": 0.5})
    return y / (1 + size) * scale


@pytest.mark.parametrize(
    "what", [of_old_form, lambda net, x: WithSetup.apply(net.square(x), torch.linspace(0.5, 1.0, 32))]
)
def test_an_autograd_function_without_a_rule_has_its_shards_one_by_one(what):
    alone, _ = trained(lambda: Square(what), images, classes, at_once=False)
    numerics, module, batch = prepared(Square(what))
    require_same_again(numerics, module, batch)
    assert numerics.apart is None
    found, apart = trained(lambda: Square(what), images, classes, at_once=True)
    assert (found, apart) == (alone, None)


class Strange(torch.autograd.Function):
    """What no pass of several shards can do."""

    @staticmethod
    def forward(ctx, x, kind, *more):
        if kind == "writes":
            ctx.mark_dirty(x)
            return x.mul_(2)
        if kind == "draws" and x[0, 0] > 0:
            torch.rand(2)
        if kind == "norm":
            return F.batch_norm(x, None, None, training=True)
        return (x * 1, x.sum().item()) if kind == "tells" else x * 1

    @staticmethod
    def backward(ctx, grad, *_):
        return grad, None, None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("writes", "Strange writes to what it is given"),
        ("draws", "shards draw different numbers of random numbers"),
        ("tells", "Strange returns other values for other shards"),
        ("norm", "an autograd.Function normalises over the batch"),
        ("list", "tensors in a list or a dict are given to an autograd.Function"),
    ],
)
def test_what_an_autograd_function_cannot_do_in_one_pass_is_told(kind, why):
    def what(net, x):
        y = net.square(x)
        found = Strange.apply(x * 1, kind, [y] if kind == "list" else 0)
        return y + (found[0] if kind == "tells" else found)

    numerics, module, batch = prepared(Square(what))
    require_same_again(numerics, module, batch)
    assert numerics.apart == f"model (Square): vmap: {why}"
    assert trained(lambda: Square(what), images, classes, at_once=True)[0]
