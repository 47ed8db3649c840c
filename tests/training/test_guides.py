"""The code of the guides for people who come with a training."""

import re
import shutil
import subprocess
import sys

import pytest
from ruamel.yaml import YAML

from conftest import ROOT, small
from samebits.params import parse_params
from samebits.records.run import read_run
from samebits.results.verdict import compare_runs
from samebits.results.verdict_text import say_apart

yaml = YAML(typ="safe")


def modules_of(page, folder):
    """Write the modules of a guide, each of which begins with its name; the text of the page."""
    text = (ROOT / "docs/guides" / page).read_text()
    found = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, flags=re.DOTALL)
    assert len(found) == text.count("```python")
    for name, code in found:
        (folder / name).write_text(code)
    return text


def test_what_becomes_of_a_script(stage, data_dir):
    text = modules_of("from-your-script.md", stage.folder)
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    given, ours = yaml.load(block), yaml.load((ROOT / "params.yaml").read_text())
    for section, values in given.items():
        assert values.keys() <= ours[section].keys()
    whole = parse_params({**ours, **{name: {**ours[name], **values} for name, values in given.items()}})
    assert (whole.total_steps, whole.train.optimizer.name) == (5 * 8192 // 256, "adam")
    given["data"] |= {"num_samples": 1024, "test_samples": 256}
    given["train"] |= {"repeats": 1, "epochs": 3}
    data = data_dir(stage.write_params(given))
    stage.train(data, "single", "--numerics", "fast")
    losses = read_run(stage.folder / "runs/single-fast").losses
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.slow
def test_the_script_runs_as_it_is(tmp_path):
    modules_of("from-your-script.md", tmp_path)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("model", "numerics", "grade", "said"),
    [
        ({"name": "withnorm:make", "kwargs": {"norm": "batch"}}, "fast", "not comparable", "model.1"),
        ({"name": "withnorm:make", "kwargs": {"norm": "group"}}, "fast", "within tolerance", None),
        ({"name": "withdrops:make", "kwargs": {"p": 0.5}}, "fast", "not comparable", "model.2"),
        ({"name": "withdrops:make", "kwargs": {"p": 0.5}}, "exact", "bitwise", None),
    ],
)
def test_what_the_guide_says_of_batchnorm_and_dropout(model, numerics, grade, said, stage, data_dir):
    text = modules_of("batchnorm-and-dropout.md", stage.folder)
    params = small(model=model, oversubscribe=True)
    params["train"] |= {"numerics": ["fast", "exact"], "repeats": 2, "epochs": 4}
    data = data_dir(stage.write_params(params))
    for strategy in ("single", "ddp"):
        stage.train(data, strategy, "--numerics", numerics)
    single, ddp = (read_run(stage.folder / f"runs/{strategy}-{numerics}") for strategy in ("single", "ddp"))
    verdict = compare_runs(single, ddp)
    assert verdict.grade == grade
    if said:
        line = say_apart(verdict)[0]
        assert said in line
        assert line in text.replace("\n", " ")
    shutil.rmtree(stage.folder / "runs")
