"""What `make` finds out before it downloads anything."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import ROOT

SMI = """#!/bin/sh
[ "$*" = -L ] && {{ echo "GPU 0: NVIDIA L4"; exit {code}; }}
cat <<'END'
+-----------------------------------------------------------------------------------------+
| {head} |
|-----------------------------------------+------------------------+----------------------+
END
exit {code}
"""
UV = "#!/bin/sh\necho uv begins >&2\nexit 7\n"


def program(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def clone(tmp_path):
    """What `make .venv` reads, and a uv that ends at once."""
    (tmp_path / "tools").mkdir()
    locks = (f"requirements.{name}.lock" for name in ("cpu", "gpu", "uv"))
    for name in ("Makefile", "tools/install.sh", "pyproject.toml", *locks):
        shutil.copy(ROOT / name, tmp_path / name)
    program(tmp_path / "bin", "uv", UV)
    return tmp_path


def make(clone, *arguments):
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "TORCH"))}
    environ["PATH"] = f"{clone / 'bin'}:{os.environ['PATH']}"
    command = ["make", ".venv", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(command, cwd=clone, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("head", "older"),
    [
        ("NVIDIA-SMI 550.54.14    Driver Version: 550.54.14    CUDA Version: 12.4     ", "12.4"),
        ("NVIDIA-SMI 470.223.02   Driver Version: 470.223.02   CUDA Version: 11.4     ", "11.4"),
        ("NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0     ", None),
        ("NVIDIA-SMI 600.10       KMD Version: 600.10          CUDA UMD Version: 13.4 ", None),
        ("NVIDIA-SMI 600.10       Driver Version: 600.10       CUDA Version: 14.1     ", None),
        ("NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: N/A      ", None),
    ],
)
def test_a_driver_that_is_older_than_the_lock_is_told_before_anything_is_downloaded(head, older, clone):
    program(clone / "bin", "nvidia-smi", SMI.format(head=head, code=0))
    done = make(clone)
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr  # as make ends whatever a command ended with
    if older is None:
        assert lines[0] == "uv begins"
        return
    assert lines[0] == (
        f"error: requirements.gpu.lock is for CUDA 13, and the driver here runs up to CUDA {older}. "
        "hint: make TORCH=cpu ..., or install a newer driver, or a torch for an older CUDA, by docs/guides/gpu-hosts.md"
    )
    assert [line for line in lines[1:] if "Error 3" not in line] == []
    assert make(clone, "TORCH=cpu").stderr.splitlines()[0] == "uv begins"


def test_the_guides_lock_for_an_older_driver_is_made_as_make_makes_them():
    guide, makefile = (ROOT / name for name in ("docs/guides/gpu-hosts.md", "Makefile"))
    (command,) = [line.removeprefix("$ ") for line in guide.read_text().splitlines() if "uv pip compile" in line]
    (flags,) = [line.partition(":= ")[2] for line in makefile.read_text().splitlines() if line.startswith("COMPILE :=")]
    extras = ["pyproject.toml", "--extra", "dev", "--extra", "gpu"]
    assert {*flags.split(), *extras} == {*command.split()} - {
        "--torch-backend", "cu126", "-o", "requirements.gpu.lock"
    }  # fmt: skip
    backends = subprocess.run(
        [Path(sys.executable).with_name("uv"), "pip", "compile", "--help"], capture_output=True, text=True
    ).stdout
    assert "cu126" in backends


def test_without_a_driver_the_cpu_lock_is_taken_and_the_gpu_lock_can_be_asked_for(clone):
    program(
        clone / "bin",
        "nvidia-smi",
        "#!/bin/sh\necho Failed to initialize NVML: Driver/library version mismatch\nexit 18\n",
    )
    assert make(clone).stderr.splitlines()[:2] == [
        "warning: nvidia-smi fails, and requirements.cpu.lock uses no GPU: Failed to initialize NVML: Driver/library "
        "version mismatch hint: a driver that was updated needs a restart; make .venv TORCH=gpu takes CUDA's build",
        "uv begins",
    ]
    assert make(clone, "TORCH=gpu").stderr.splitlines()[0] == "uv begins"  # a login node may install for others


@pytest.mark.parametrize(("answer", "old"), [("7.5\n8.0", None), ("9.0\n7.0", "7.0"), ("10.0", None), ("[N/A]", None)])
def test_a_gpu_that_is_older_than_the_lock_is_told_before_anything_is_downloaded(answer, old, clone):
    head = SMI.format(head="NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0     ", code=0)
    asked = f"#!/bin/sh\ncase $1 in --query-gpu=compute_cap) printf '{answer}\\n'; exit 0;; esac\n"
    program(clone / "bin", "nvidia-smi", asked + head.partition("\n")[2])
    done = make(clone)
    assert done.stderr.splitlines()[0] == (
        f"error: requirements.gpu.lock is for GPUs of compute capability 7.5 or newer, and one here has {old}. "
        "hint: make TORCH=cpu ..., or a torch for an older CUDA, by docs/guides/gpu-hosts.md"
        if old
        else "uv begins"
    )


def wheel(folder, version):
    """A package of PyTorch's name in which there is nothing, and its line in a lock."""
    folder.mkdir(exist_ok=True)
    file = folder / f"torch-{version}-py3-none-any.whl"
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return f"torch=={version} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"


def test_a_build_for_the_cpu_gives_way_to_cudas(tmp_path):
    """And back: an environment that was made where there was no GPU, or while no driver answered."""
    venv, versions = tmp_path / ".venv-lint", {"cpu": "2.13.0+cpu", "gpu": "2.13.0"}
    locks = {name: wheel(tmp_path / name, version) for name, version in versions.items()}
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "UV_NO_INDEX": "1"}
    for name in ("cpu", "gpu", "gpu", "cpu"):
        (tmp_path / f"{name}.lock").write_text(locks[name])
        environ["UV_FIND_LINKS"] = str(tmp_path / name)
        command = ["sh", str(ROOT / "tools/install.sh"), sys.executable, str(tmp_path / f"{name}.lock"), ".venv-lint"]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        installed = [path.name for path in venv.rglob("torch-*.dist-info")]
        assert installed == [f"torch-{versions[name]}.dist-info"]
