"""Datasets of the user's own: the samples, their random numbers, and batches by PyTorch's DataLoader."""

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from ruamel.yaml import YAML
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from conftest import ROOT, small, wait_for
from patience import patient
from samebits import Experiment
from samebits.batch_split import BatchSplit
from samebits.errors import UserError
from samebits.models.nested import leaves_of, rows_of
from samebits.params import parse_params
from samebits.params.schema import Loader
from samebits.records.card import read_card
from samebits.records.run import read_run
from samebits.results.verdict import compare_runs
from samebits.results.verdict_text import say_comparison
from samebits.training.batches import Batches, load_data, order_of
from samebits.training.datasets import LoadedBatches, described, in_order
from samebits.training.models import build
from samebits.training.models.build import build_experiment
from samebits.training.samples import Samples, apart
from samebits.training.setup import Setup
from samebits.training.worker import Worker
from samples import placed

CPU = torch.device("cpu")
NO_PROCESS, TWO = Loader(num_workers=0), Loader(num_workers=2)


@dataclass
class Item:
    image: torch.Tensor
    label: int


class Drawing:
    """Its samples hold numbers of each of the three generators."""

    def __init__(self, count=8):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002
        return torch.tensor([float(number), *drawn]), number


def test_random_numbers_of_a_sample_are_its_own():
    """Whatever was loaded before, and by which process; they differ between samples, epochs and seeds."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    samples = Samples("train_data", Drawing(), 8, 5)
    first = samples.batch([(0, 3)]).samples[0][0]
    assert samples.batch([(0, 4), (0, 3)]).samples[0][1].equal(first)
    another_seed, another_split = Samples("train_data", Drawing(), 8, 6), Samples("test_data", Drawing(), 8, 5)
    for source, key in ((samples, (1, 3)), (samples, (0, 4)), (another_seed, (0, 3)), (another_split, (0, 3))):
        assert (source.batch([key]).samples[0][0][1:] != first[1:]).all()
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before  # noqa: NPY002
    for loader in (NO_PROCESS, TWO, Loader(num_workers=3, prefetch_factor=1)):
        batches = [*in_order(samples, 3, loader, CPU)]
        assert [rows_of(inputs) for inputs, _ in batches] == [3, 3, 2]
        assert torch.cat([inputs for inputs, _ in batches])[3].equal(first)
        assert torch.cat([targets for _, targets in batches]).tolist() == [*range(8)]


class Seldom(Drawing):
    """Draws from Python's and NumPy's generators for some samples only; it counts how often each is made."""

    def __init__(self, rare):
        super().__init__(64)
        self.rare, self.made = rare, Counter()

    def __getitem__(self, number):
        self.made[number] += 1
        drawn = [random.random(), np.random.rand()] if number in self.rare else [0.0, 0.0]  # noqa: NPY002
        return number, *drawn


@pytest.mark.parametrize("rare", [(), (0,), (5,), (63,), (20, 40), (5, 8, 60)])
def test_numbers_that_few_samples_draw_are_their_own(rare):
    """Generators are seeded for each sample once one has drawn; the batch in which it did is made again, once."""
    dataset = Seldom(rare)
    together = Samples("train_data", dataset, 64, 5)
    parts = [together.batch([(0, i) for i in range(start, start + 16)]) for start in range(0, 64, 16)]
    found = torch.stack([torch.cat([part.samples[i] for part in parts]) for i in (1, 2)])
    often = Counter(dataset.made)
    for number in range(64):
        alone = Samples("train_data", dataset, 64, 5).batch([(0, number)]).samples[1:]
        assert found[:, number].equal(torch.cat(alone))
        assert (found[:, number] != 0).all() == (number in rare)
    again = {*range(rare[0] // 16 * 16, rare[0] // 16 * 16 + 16)} - {0} if rare and rare[0] else set()
    assert often == Counter(range(64)) + Counter(again)


def test_an_error_that_depends_on_a_draw_is_of_the_samples_own_number():
    """The first draw of a batch has no seed of its own sample; what raised because of it is made again."""
    seen = []

    class Fails(Seldom):
        def __getitem__(self, number):
            drawn = random.random() if number > 2 else 0.0
            if number == 5:
                seen.append(drawn)
                raise ValueError(drawn)
            return drawn

    for _ in range(2):
        with pytest.raises(UserError, match="sample 5: ValueError: 0"):
            Samples("train_data", Fails(()), 64, 5).batch([(0, number) for number in range(8)])
    with pytest.raises(UserError):
        Samples("train_data", Fails(()), 64, 5).batch([(0, 5)])
    assert seen[0] != seen[1] == seen[3] == seen[4]


def test_numpys_numbers_of_the_training_go_on_after_samples():
    """Also the second of two normal numbers, which NumPy keeps, and of a generator that is not its usual one."""
    samples, theirs = Samples("train_data", Drawing(), 8, 5), np.random.get_bit_generator()
    for generator in (np.random.MT19937(3), np.random.PCG64(3)):
        np.random.set_bit_generator(generator)
        try:
            state = np.random.get_state(legacy=False)  # noqa: NPY002
            expected = [np.random.randn() for _ in range(4)]  # noqa: NPY002
            np.random.set_state(state)  # noqa: NPY002
            found = []
            for number in range(4):
                found.append(np.random.randn())  # noqa: NPY002
                samples.batch([(0, number)])
            assert found == expected
        finally:
            np.random.set_bit_generator(theirs)


SPLITS = [
    BatchSplit(samples=16, shards=None, grad_accum_steps=1),
    BatchSplit(samples=16, shards=None, grad_accum_steps=2, ranks=2),
    BatchSplit(samples=16, shards=4, grad_accum_steps=1, ranks=3),
]


@pytest.mark.parametrize("loader", [NO_PROCESS, TWO])
@pytest.mark.parametrize("groups", [0, 16])
@pytest.mark.parametrize("split", SPLITS)
def test_batches_are_those_of_the_same_samples_in_memory(split, loader, groups, data_dir):
    params = parse_params(small())
    folder = data_dir(params)
    card = read_card(folder / "card.json")
    arrays = load_data(folder, card, "train")
    samples = Samples("train_data", TensorDataset(*arrays), len(arrays[0]), 0)
    for rank in range(split.ranks):
        ours = LoadedBatches(samples, split, loader, rank=rank, seed=0, device=CPU, groups=groups)
        theirs = Batches(arrays, card, split, rank=rank, seed=0, device=CPU)
        assert (ours.micro_batches, ours.steps_per_epoch) == (theirs.micro_batches, theirs.steps_per_epoch)
        last = ours.steps_per_epoch
        for step in (0, 1, 2, last - 1, last, 1, 1, 0):  # on, over an epoch's end, and back, as slices and resumes go
            ours.ready(step)
            for index in range(ours.micro_batches):
                mine, other = ours.micro_batch(step, index), theirs.micro_batch(step, index)
                assert mine.inputs.equal(other.inputs)
                assert mine.targets.equal(other.targets)
                assert mine[2:] == other[2:]


class Raising(Drawing):
    def __getitem__(self, number):
        return 1 // (number - 5)


class Named(Drawing):
    def __getitem__(self, number):
        return {"image": torch.ones(2), "file": f"{number}.png"}


class Ragged(Drawing):
    def __getitem__(self, number):
        return {"ids": torch.ones(number + 1, dtype=torch.int64)}, 0


class Typed(Drawing):
    def __getitem__(self, number):
        return torch.ones(2, dtype=torch.float64 if number else torch.float32), 0


class Optional(Drawing):
    def __getitem__(self, number):
        return {"image": 1, **({"mask": 2} if number else {})}


class Endless(IterableDataset):
    def __iter__(self):
        yield 1


WRONG = [
    (Endless(), "train_data: Endless has no samples by number. hint: give a dataset with __len__ and __getitem__"),
    (5, "train_data: int has no samples by number. hint: "),
    (Drawing(0), "train_data: it has no samples. hint: give it a length, by __len__"),
    (Raising(), "train_data: sample 5: ZeroDivisionError: integer division or modulo by zero. hint: see tests/"),
    (Named(), "train_data: sample 0, its part file: it is str, expected a tensor, an array or a number. hint: "),
    (Ragged(), "train_data: sample 1 has 0.ids: int64 (2,), 1: int64 (), and sample 0 has 0.ids: int64 (1,), 1"),
    ([{"image": None}], "train_data: sample 0: it is empty, expected a tensor, an array or a number. hint: check the"),
    ([()], "train_data: sample 0: it is empty, "),
    ([np.arange(3)[::-1]], "train_data: sample 0: At least one stride in the given numpy array is negative"),
    ([{"x": 2**70}], "train_data: sample 0, its part x: Overflow when unpacking long long. hint: convert it in the da"),
    (Typed(), "train_data: sample 1 has 0: float64 (2,), 1: int64 (), and sample 0 has 0: float32 (2,), 1: int64 ()"),
    (Optional(), "train_data: sample 1 has image: int64 (), mask: int64 (), and sample 0 has image: int64 ()"),
]  # fmt: skip


@pytest.mark.parametrize("loader", [NO_PROCESS, TWO])
@pytest.mark.parametrize(("dataset", "message"), WRONG, ids=[message[12:40] for _, message in WRONG])
def test_what_is_wrong_with_a_dataset_is_said(dataset, message, loader):
    with pytest.raises(UserError) as caught:
        list(in_order(Samples("train_data", dataset, 8, 0), 4, loader, CPU))
    assert str(caught.value).startswith(message)


def test_samples_become_tensors_of_any_nesting():
    value = {"a": np.float32(1.5), "b": (2, True), "c": np.arange(3, dtype=np.int16), "d": 0.5, "e": None}
    batch = Samples("x", [value], 1, 0).batch([(0, 0)] * 2)
    found = {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in leaves_of(batch.samples)}
    assert found == {"a": ("torch.float32", (2,)), "b.0": ("torch.int64", (2,)), "b.1": ("torch.bool", (2,)),
                     "c": ("torch.int16", (2, 3)), "d": ("torch.float32", (2,))}  # fmt: skip


def test_a_part_that_is_none_may_be_left_out_of_another_sample():
    samples = Samples("x", [{"a": 1, "mask": None}, {"a": 2}], 2, 0)
    assert samples.batch([(0, 0), (0, 1)]).samples["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("sample", "loss", "shape", "pair"),
    [
        ((torch.ones(3), 1), "cross_entropy", (), True),
        ([torch.ones(3), torch.ones(4, dtype=torch.int64)], "cross_entropy", (4,), True),
        ((torch.ones(3), torch.ones(2)), "mse", (2,), True),
        ((torch.ones(3), {"boxes": torch.ones(2)}), "own", (), True),
        ({"x": torch.ones(3), "labels": 1}, "own", (), False),
        ((torch.ones(3),), "own", (), False),
        (Item(torch.ones(3), 1), "own", (), False),
    ],
)
def test_the_first_sample_shows_which_loss_fits(sample, loss, shape, pair):
    card = SimpleNamespace(loss="own", target_shape=(), model_copy=lambda update: SimpleNamespace(**update))
    found = described(card, Samples("train_data", [sample], 1, 0))
    assert (found.loss, tuple(found.target_shape)) == (loss, shape)
    assert (apart(sample).targets is None) is not pair


@pytest.mark.parametrize(
    ("task", "given", "message"),
    [
        ("dataset", {}, "it has no train_data, and data.task is dataset. hint: give samebits.Experiment a train_data"),
        ("dataset", {"train_data": Drawing()}, "it has no test_data, and data.task is dataset"),
        ("vectors", {"train_data": Drawing()}, "it has a train_data, and data.task is vectors. hint: set data.task"),
    ],
)
def test_data_of_the_factory_and_data_of_the_params_are_told_apart(task, given, message, monkeypatch):
    monkeypatch.setattr(build, "import_factory", lambda name, source: lambda: Experiment(nn.Linear(2, 2), **given))
    model = parse_params(small(model={"name": "mine:make"})).model
    with pytest.raises(UserError, match=f"model.name: mine:make: {message}"):
        build_experiment(model, SimpleNamespace(task=task), 0)


def test_a_built_in_model_has_no_dataset():
    with pytest.raises(UserError, match=r"model\.name: got 'mlp', accepts a factory of your own for data.task dataset"):
        parse_params({"data": {"task": "dataset"}})


MINE = """
import random
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from samebits import Experiment

class Points(torch.utils.data.Dataset):
    def __init__(self, count, first=0, form="pair"):
        self.count, self.first, self.form = count, first, form

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        point = np.random.default_rng(self.first + number).normal(size=6).astype("float32")
        label = int(point[:3].sum() > point[3:].sum())
        point = torch.from_numpy(point) + 0.05 * torch.randn(6) + 0.01 * random.random()  # augmented
        if self.form == "pair":
            return point, label
        return {"left": point[:3], "right": point[3:], "labels": label}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.top = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, left, right, labels):
        logits = self.top(torch.tanh(self.left(left) + self.right(right)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

def pairs():
    return Experiment(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)),
                      train_data=Points(512), test_data=Points(128, 10**6))

def of_each(outputs, batch):
    return F.cross_entropy(outputs["logits"], batch["labels"], reduction="none")

def whole():
    return Experiment(Net(), of_each,
                      train_data=Points(512, form="whole"), test_data=Points(128, 10**6, form="whole"))

class Failing(nn.Linear):
    def forward(self, x):
        raise ArithmeticError("no such sum")

def failing():
    return Experiment(Failing(6, 2), train_data=Points(512), test_data=Points(128, 10**6))

def its_own_loss():
    return Experiment(Net(), train_data=Points(512, form="whole"), test_data=Points(128, 10**6, form="whole"))
"""
DATA = {"task": "dataset", "num_samples": 512, "test_samples": 128}


@pytest.fixture
def mine(stage, data_dir):
    """Train one of the experiments, by its name."""
    (stage.folder / "mine.py").write_text(MINE)

    def train(factory, strategy, numerics, *arguments, **settings):
        defaults = {"optimizer": {"name": "adam", "lr": 0.02}, "global_batch_size": 64, "epochs": 3, "repeats": 1}
        params = {
            "data": DATA, "model": {"name": f"mine:{factory}"},
            "train": {**defaults, "oversubscribe": True, "numerics": ["fast", "exact"], **settings},
        }  # fmt: skip
        data = data_dir(stage.write_params(params))
        stage.train(data, strategy, "--numerics", numerics, *arguments)
        return read_run(stage.folder / f"runs/{strategy}-{numerics}")

    return train


@pytest.mark.parametrize(
    "factory", ["pairs", *(pytest.param(name, marks=pytest.mark.slow) for name in ("whole", "its_own_loss"))]
)
def test_a_dataset_trains_alike_under_every_strategy_and_number_of_loaders(factory, mine):
    single = mine(factory, "single", "fast")
    assert single.losses[-1] < 0.9 * single.losses[0]
    assert mine(factory, "ddp", "fast").losses == pytest.approx(single.losses, rel=1e-4)
    exact = mine(factory, "single", "exact", loader={"num_workers": 0})
    assert exact.losses == pytest.approx(single.losses, rel=1e-3)
    for count, workers in (("2", 0), ("3", 1)):
        again = mine(factory, "ddp", "exact", "--num-devices", count, loader={"num_workers": workers})
        assert (again.record.weights_sha256, again.losses) == (exact.record.weights_sha256, exact.losses)


def test_processes_that_load_end_quietly_with_a_training_that_fails(stage, data_dir):
    """PyTorch's handler of SIGCHLD would raise in the rank, which has reported its error, for each of them."""
    (stage.folder / "mine.py").write_text(MINE)
    train = {"loader": {"num_workers": 8}, "global_batch_size": 64, "repeats": 1}
    data = data_dir(stage.write_params({"data": DATA, "model": {"name": "mine:failing"}, "train": train}))
    done = stage("train", "--data-dir", str(data), "--strategy", "single", "--numerics", "fast", "--no-tracking")
    assert (done.returncode, "the model or its loss raised ArithmeticError: no such sum" in done.stderr) == (2, True)
    assert [line for line in done.stderr.splitlines() if not line.startswith(("error: ", "mine.py", "mine:"))] == []


def test_the_guides_dataset_trains(stage, data_dir):
    text = (ROOT / "docs/guides/your-own-data.md").read_text().partition("```python\n# mydata.py\n")[2]
    (stage.folder / "mydata.py").write_text(text.partition("```")[0])
    given = YAML(typ="safe").load(text.partition("```yaml\n")[2].partition("```")[0])
    given["data"] |= {"num_samples": 512, "test_samples": 128}
    given["train"] |= {"global_batch_size": 128, "repeats": 1, "epochs": 4}
    data = data_dir(stage.write_params(given))
    stage.train(data, "single", "--numerics", "exact")
    losses = read_run(stage.folder / "runs/single-exact").losses
    assert losses[-1] < 0.7 * losses[0]
    stage.well("evaluate", "--data-dir", str(data), "runs/single-exact")
    (found,) = (stage.folder / "reports/evaluation").glob("*.json")
    evaluation = json.loads(found.read_text())
    assert (evaluation["samples"], evaluation["floor"]) == (128, None)
    assert evaluation["accuracy"] > 0.5


# -- the data are told apart from the training ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"x": torch.ones(2), "y": 1}, {"x": torch.ones(2), "y": 1}, True),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}, False),
        (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous(), True),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), True),
        (torch.tensor(True), torch.tensor(False), False),
    ],
)
def test_a_digest_is_of_names_types_shapes_and_bytes(one, other, same):
    one, other = (Samples("x", [value], 1, 0).batch([(0, 0)], digests=True).digests for value in (one, other))
    assert one.equal(other) is same


@pytest.mark.parametrize("groups", [16, 5, 1])
@pytest.mark.parametrize("split", SPLITS)
def test_digests_do_not_depend_on_how_a_batch_is_split(split, groups):
    samples = Samples("train_data", Drawing(48), 48, 0)
    sums = torch.zeros(4, groups, dtype=torch.int64)
    for rank in range(split.ranks):
        batches = LoadedBatches(samples, split, TWO, rank=rank, seed=0, device=CPU, groups=groups)
        for step in (0, 1, 2, 3, 3, 1):  # some are made again
            for index in range(batches.micro_batches):
                batches.micro_batch(step, index)
        sums += batches.digests(0, 4)
    expected = torch.zeros(4, groups, dtype=torch.int64)
    for step in range(4):
        epoch, position = divmod(step, 3)
        numbers = order_of(0, epoch, 48)[position * 16 : position * 16 + 16].tolist()
        for place, number in enumerate(numbers):
            expected[step, place * groups // 16] += samples.batch([(epoch, number)], digests=True).digests[0]
    assert sums.equal(expected)


def test_other_data_are_told_from_another_training(mine, stage):
    first = mine("pairs", "single", "exact")
    assert first.record.batches.groups == 64
    kept = stage.folder / "first"
    shutil.copytree(first.folder, kept)
    text = (stage.folder / "mine.py").read_text()
    changed = text.replace("        label = int(", "        point[1] += (number == 300) * 1e-3\n        label = int(")
    (stage.folder / "mine.py").write_text(changed)
    verdict = compare_runs(read_run(kept), mine("pairs", "single", "exact"))
    where = order_of(0, 0, 512).tolist().index(300)
    step, sample = where // 64 + 1, where % 64 + 1
    assert verdict.data == f"the data differ, from sample {sample} of step {step}"
    assert f"  {verdict.data}" in say_comparison(verdict, {}).splitlines()
    (stage.folder / "mine.py").write_text(text)
    assert compare_runs(read_run(kept), mine("pairs", "single", "exact")).grade == "bitwise"
    verdict = compare_runs(read_run(kept), mine("pairs", "single", "exact", optimizer={"name": "adam", "lr": 0.03}))
    assert (verdict.grade, verdict.data) == ("diverged", "the data are the same at every step")


SLOWLY = """
from mine import *

class Slowly(Points):
    def __getitem__(self, number):
        import os, time
        time.sleep(0.02 * os.path.exists("slowly"))
        return super().__getitem__(number)

def slowly():
    experiment = pairs()
    return Experiment(experiment.model, train_data=Slowly(512), test_data=experiment.test_data)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["the training", "a loading process"])
def test_a_training_that_is_cut_off_goes_on_with_the_same_samples(ends, stage, data_dir):
    (stage.folder / "mine.py").write_text(MINE)
    (stage.folder / "slow.py").write_text(SLOWLY)
    train = {"optimizer": {"name": "adam", "lr": 0.02}, "global_batch_size": 64, "epochs": 3, "repeats": 1,
             "checkpoint_every_steps": 3, "oversubscribe": True}  # fmt: skip
    params = {"data": DATA, "model": {"name": "slow:slowly"}, "train": train}
    stage.write_params(params)
    stage.well("prepare")
    arguments = ["--numerics", "exact", "--no-tracking", "--out-dir"]
    stage.well("train", "--strategy", "ddp", *arguments, "whole")
    whole = read_run(stage.folder / "whole")
    (stage.folder / "slowly").touch()
    command = [sys.executable, stage.script("train"), "--strategy", "single", *arguments, "again"]
    with subprocess.Popen(command, cwd=stage.folder, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: [*stage.folder.glob(".samebits/resume/*/*.safetensors")])
        if ends == "the training":
            process.terminate()
        else:
            (rank,) = psutil.Process(process.pid).children()
            psutil.Process(rank.pid).children()[0].kill()
        _, said = process.communicate(timeout=patient(120))
    if ends == "the training":
        assert process.returncode == 143
    else:
        assert process.returncode == 4
        assert "a loading process of the dataset ended" in said
    (stage.folder / "slowly").unlink()
    stage.write_params({**params, "train": {**train, "loader": {"num_workers": 0}}})
    stage.well("train", "--strategy", "ddp", *arguments, "again")
    again = read_run(stage.folder / "again")
    assert [note.kind for note in again.record.notes][:1] == ["resumed"]
    assert again.record.weights_sha256 == whole.record.weights_sha256
    assert again.record.batches == whole.record.batches


@pytest.mark.parametrize("other", [0.7, {"label": 1}])
def test_targets_of_two_kinds_are_refused(other):
    """They are not rounded to classes."""
    made = [(torch.ones(3), 1), (torch.ones(3), other)]
    samples = Samples("train_data", made, 2, 0).with_targets(torch.int64)
    with pytest.raises(
        UserError, match=r"^train_data: sample 1 has 0: float32 \(3,\), 1.*, and sample 0 has 0: float32"
    ):
        list(in_order(samples, 2, NO_PROCESS, CPU))


@pytest.mark.parametrize(
    ("kind", "loss", "taken"),
    [
        (torch.int32, None, torch.int64),
        (torch.bool, None, torch.int64),
        (torch.uint8, None, torch.int64),
        (torch.float64, None, torch.float32),
        (torch.int32, F.l1_loss, torch.int32),
    ],
)
def test_targets_get_the_type_that_a_built_in_loss_takes(kind, loss, taken, data_dir, monkeypatch):
    """A dataset gives classes as any integers, and values as any floats; a loss of its own gets what it gives."""
    made = TensorDataset(torch.ones(16, 3), torch.arange(16).remainder(2).to(kind))
    experiment = Experiment(nn.Linear(3, 2), loss, train_data=made, test_data=made)
    monkeypatch.setattr(build, "import_factory", lambda name, source: lambda: experiment)
    data = {"task": "dataset", "num_samples": 16, "test_samples": 16}
    params = parse_params({"data": data, "model": {"name": "m:f"}, "train": {"global_batch_size": 8}})
    _, split = placed("single", params, gpus=0, cores=1, numerics="fast")
    folder = data_dir(params)
    setup = Setup(params, "fast", read_card(folder / "card.json"), split=split, worker=Worker([CPU]))
    setup.build()
    found = next(setup.in_order(setup.load(folder, "test", at_least=32), 4)).targets
    assert (found.dtype, found.tolist()) == (taken, [0, 1, 0, 1])
