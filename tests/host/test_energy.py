"""RAPL's energy counters, from a made-up folder."""

import pytest

from samebits.host import Rapl


@pytest.fixture
def powercap(tmp_path):
    def write(zone, name, energy, limit=1_000_000_000):
        folder = tmp_path / zone
        folder.mkdir(exist_ok=True)
        for file, text in (("name", name), ("energy_uj", energy), ("max_energy_range_uj", limit)):
            (folder / file).write_text(f"{text}\n")

    write("intel-rapl:0", "package-0", 5_000_000)
    write("intel-rapl:1", "package-1", 900_000_000)
    write("intel-rapl:0:0", "core", 7)
    write("intel-rapl:2", "psys", 7)
    write.root = tmp_path
    return write


def test_packages_are_added_up(powercap):
    rapl = Rapl(powercap.root)
    assert rapl.joules() == 0.0
    powercap("intel-rapl:0", "package-0", 8_000_000)
    powercap("intel-rapl:1", "package-1", 901_500_000)
    powercap("intel-rapl:0:0", "core", 900_000_000)  # part of its package
    powercap("intel-rapl:2", "psys", 900_000_000)  # the packages and more
    assert rapl.joules() == pytest.approx(4.5)
    assert rapl.joules() == pytest.approx(4.5)


def test_a_counter_that_begins_again(powercap):
    rapl = Rapl(powercap.root)
    for energy, joules in ((100_000_000, 200.0), (600_000_000, 700.0), (0, 1100.0)):
        powercap("intel-rapl:1", "package-1", energy)
        assert rapl.joules() == pytest.approx(joules)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda file: file.unlink(), "No such file or directory"),
        (lambda file: file.write_text("much\n"), "invalid literal"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_counter_that_cannot_be_read_is_said(spoil, why, when, powercap):
    if when == "after":
        rapl = Rapl(powercap.root)
    spoil(powercap.root / "intel-rapl:1/energy_uj")
    if when == "before":
        rapl = Rapl(powercap.root)
    assert rapl.joules() is None
    assert rapl.problem.startswith(why)


def test_a_host_without_counters(tmp_path):
    rapl = Rapl(tmp_path / "nowhere")
    assert (rapl.joules(), rapl.problem) == (
        None,
        "the kernel shows no RAPL counter of a package, nor is there a GPU's",
    )
