"""CUDA graphs on real GPUs: the bits of a training without them, and models that cannot be captured."""

import pytest

from conftest import MODEL_OF_TASK, small
from samebits.hashes import sha256
from samebits.host import count_gpus
from samebits.records.run import read_run

pytestmark = pytest.mark.gpus(1)


@pytest.fixture
def both(stage, data_dir):
    """Train a model with graphs and without, and return the runs in that order."""

    def train(strategy, raw, *arguments):
        data = data_dir(stage.write_params(raw))
        graphed = {**raw, "train": {**raw["train"], "cuda_graphs": True}}
        runs = []
        for name, params in (("graphed", graphed), ("plain", raw)):
            stage.write_params(params)
            options = ["--strategy", strategy, "--no-tracking", "--data-dir", str(data), "--out-dir", name, *arguments]
            done = stage.fresh("train", *options)
            assert done.returncode == 0, done.stderr
            assert "CUDA Graph is empty" not in done.stderr
            runs.append(read_run(stage.folder / name))
        return runs

    return train


def assert_same(graphed, plain):
    assert "train.cuda_graphs" not in graphed.record.not_applied
    assert graphed.losses == plain.losses
    assert graphed.record.weights_sha256 == plain.record.weights_sha256
    assert sha256(graphed.folder / "model.safetensors") == sha256(plain.folder / "model.safetensors")
    assert graphed.record.first_unrepeated_step is None


@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
def test_graphs_give_the_same_bits(task, both):
    assert_same(*both("single", small(task, optimizer={"name": "sgd", "lr": 0.01}, repeats=2)))


@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
def test_graphs_give_the_same_bits_in_exact(task, both):
    raw = small(task, optimizer={"name": "adamw", "lr": 0.001}, clip_grad_norm=1.0, repeats=2)
    graphed, plain = both("single", raw, "--numerics", "exact")
    assert_same(graphed, plain)
    assert graphed.record.arithmetic.not_replayed is None
    assert graphed.record.arithmetic.steps_made_again == plain.record.arithmetic.steps_made_again


def test_graphs_draw_the_same_dropout_in_exact(both):
    model = {"name": "gpt", "kwargs": {"dropout": 0.2}}
    assert_same(*both("single", small("tokens", model=model, repeats=2), "--numerics", "exact"))


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_graphs_give_the_same_bits_in_every_precision(precision, both):
    raw = small("tokens", precision=precision, clip_grad_norm=1.0, optimizer={"name": "adamw", "lr": 0.001}, repeats=2)
    assert_same(*both("single", raw))


def test_graphs_draw_the_same_dropout(both):
    model = {"name": "mlp", "kwargs": {"hidden": [16, 16], "dropout": 0.2}}
    assert_same(*both("single", small(model=model, repeats=2)))


@pytest.mark.shares_a_gpu
def test_graphs_under_ddp_on_a_shared_gpu(both):
    count = count_gpus() + 1
    raw = small(oversubscribe=True, optimizer={"name": "sgd", "lr": 0.01}, repeats=2)
    raw["train"]["global_batch_size"] = 16 * count
    assert_same(*both("ddp", raw, "--num-devices", str(count)))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
def test_graphs_under_ddp(task, both):
    graphed, plain = both("ddp", small(task, optimizer={"name": "sgd", "lr": 0.01}, repeats=2))
    assert_same(graphed, plain)
    assert graphed.record.placement.backend == "nccl"
    assert graphed.timing.speedup.median > 0  # the references were captured too


def test_checkpoints_that_are_written_between_replays_change_nothing(both):
    assert_same(*both("single", small(checkpoint_every_steps=1, epochs=4, repeats=2)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("        if y.sum().item() > 0:\n            y = y + 1\n", "mine.py:5: the model cannot be captured: "),
        ("        y = y + random.random()\n", "forward draws random numbers on the host"),
        ("        y = y + torch.rand(()).to(y.device)\n", "forward draws random numbers on the host"),
        ("        self.calls = getattr(self, 'calls', 0) + 1\n", "model.calls: written in forward"),
    ],
)
def test_a_model_that_cannot_be_captured_is_named(body, message, stage, data_dir):
    (stage.folder / "mine.py").write_text(
        "import random, torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n"
        f"        y = super().forward(x)\n{body}        return y\n"
        "def make():\n    return Net(128, 10)\n"
    )
    params = stage.write_params(small(model={"name": "mine:make", "source": "mine.py"}, cuda_graphs=True))
    done = stage.fresh("train", "--strategy", "single", "--no-tracking", "--data-dir", str(data_dir(params)))
    assert done.returncode == 2, done.stderr
    assert f"error: train.cuda_graphs: {message}" in done.stderr
    assert "or set train.cuda_graphs: false" in done.stderr
