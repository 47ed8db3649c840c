"""The variables of the environment are listed, and take what the list says."""

import re
from pathlib import Path

import pytest

from samebits.errors import UserError
from samebits.host.variables import SLURM, VARIABLES, chosen

ROOT = Path(__file__).resolve().parents[2]
TOLD = {
    "SAMEBITS_CONTAINER", "SAMEBITS_CONTAINER_TOOLKIT", "SAMEBITS_HOST_GPUS", "SAMEBITS_IMAGE_DIGEST",
    "SAMEBITS_IMAGE_ID", "SAMEBITS_INIT_METHOD", "SAMEBITS_LAUNCH", "SAMEBITS_PLACE_TOLD", "SAMEBITS_PROGRESS",
    "SAMEBITS_REPRODUCES", "SAMEBITS_UI_OWN",
}  # fmt: skip
"""Those that the kit, its images or Compose set for what they start."""


@pytest.mark.parametrize("name", [name for name, variable in VARIABLES.items() if variable.choices])
def test_a_variable_with_choices_takes_them_alone(name):
    for value in VARIABLES[name].choices:
        assert chosen(name, {name: value}) == value
    for environ in ({}, {name: ""}):  # Compose passes an unset variable as an empty one
        assert chosen(name, environ) is None
    accepted = re.sub(r", (?=[^,]+$)", " or ", ", ".join(VARIABLES[name].choices))
    with pytest.raises(UserError, match=rf"^{name}: got 'int16', accepts {accepted}. hint: unset {name}$"):
        chosen(name, {name: "int16"})


def test_each_variable_that_the_sources_name_is_listed():
    files = ROOT.glob("src/**/*.py")
    named = {name for file in files for name in re.findall(r"\bSAMEBITS_[A-Z_]*[A-Z]\b", file.read_text())}
    assert named - {*VARIABLES, SLURM.rstrip("_"), *TOLD} == set()
    assert named >= TOLD
    assert all(bool(variable.choices) != bool(variable.accepts) for variable in VARIABLES.values())


def test_those_of_compose_alone_are_in_its_files():
    text = "".join(file.read_text() for file in ROOT.glob("docker-compose*.yml"))
    for name, variable in VARIABLES.items():
        assert (f"${{{name}:" in text) == (variable.only == "Compose"), name
