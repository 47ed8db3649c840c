#!/bin/sh
# Make an environment and install one lock into it. Usage: tools/install.sh PYTHON LOCK FOLDER
# uv is taken from the PATH, else installed into the environment by pip, from its own lock.
# Exit code 3: this host cannot run what the lock holds.
set -eu
python=$1 lock=$2 venv=$3
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || {
    echo "error: $("$python" --version 2>/dev/null || echo "no $python") found, 3.11 to 3.13 needed. hint: make PYTHON=python3.12 ..." >&2
    exit 3
}
# CUDA's packages are gigabytes, which a driver of an older major version cannot run. No nvidia-smi, as on a login node
# or in the build of an image, says nothing. The CPU lock has such packages too, for platforms without a CPU build.
needs=
grep -q '+cpu' "$lock" || needs=$(sed -n 's/^nvidia-[a-z]*-cu\([0-9][0-9]*\)==.*/\1/p' "$lock" | head -n 1)
runs=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA [A-Z ]*Version: *\([0-9][0-9.]*\).*/\1/p' | head -n 1)
if [ -n "$needs" ] && [ -n "$runs" ] && [ "${runs%%.*}" -lt "$needs" ]; then
    echo "error: $lock is for CUDA $needs, and the driver here runs up to CUDA $runs." \
        "hint: make TORCH=cpu ..., or install a newer driver, or a torch for an older CUDA, by" \
        "docs/guides/gpu-hosts.md" >&2
    exit 3
fi
oldest=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x '[0-9]*\.[0-9]*' |
    sort -V | head -n 1)
if [ "$needs" = 13 ] && [ -n "$oldest" ] && [ "$(printf '%s\n' "$oldest" 7.5 | sort -V | head -n 1)" != 7.5 ]; then
    echo "error: $lock is for GPUs of compute capability 7.5 or newer, and one here has $oldest." \
        "hint: make TORCH=cpu ..., or a torch for an older CUDA, by docs/guides/gpu-hosts.md" >&2
    exit 3
fi
if grep -q '+cpu' "$lock" && command -v nvidia-smi >/dev/null && ! said=$(nvidia-smi -L 2>&1); then
    echo "warning: nvidia-smi fails, and $lock uses no GPU: $(echo "$said" | head -n 1)" \
        "hint: a driver that was updated needs a restart; make .venv TORCH=gpu takes CUDA's build" >&2
fi
if command -v uv >/dev/null 2>&1; then
    uv=uv
    [ -x "$venv/bin/python" ] || uv venv --quiet --python "$python" "$venv"
else
    uv=$venv/bin/uv
    [ -x "$venv/bin/python" ] || "$python" -m venv --without-pip "$venv"
    [ -x "$uv" ] || {
        # Python's own pip installs into the environment: to make a pip in there first takes seconds.
        # A pip of before 22.3, as distributions have beside a newer Python, cannot.
        if "$python" -m pip --python "$venv/bin/python" --version >/dev/null 2>&1; then
            set -- "$python" -m pip --python "$venv/bin/python"
        elif "$venv/bin/python" -m ensurepip >/dev/null 2>&1; then
            set -- "$venv/bin/python" -m pip
        else
            echo "error: $python has no pip. hint: apt install python3-pip, or install uv" >&2
            exit 3
        fi
        "$@" install --quiet --disable-pip-version-check --require-hashes -r requirements.uv.lock
    }
fi
# uv does not read pip's setting of a folder with wheels.
links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
set -- --require-hashes -r "$lock"
if ! grep -q '+cpu' "$lock"; then
    # CUDA's torch, or none: an index has it. A build for the CPU has the same version but for its local part, and would
    # be left as it is.
    case $("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null) in
    *+cpu) set -- --reinstall-package torch "$@" ;;
    esac
elif [ -n "$links" ]; then
    set -- --find-links "$links" "$@"
elif "$python" -c 'import platform, sys; sys.exit(not (sys.version_info[:2] == (3, 11) and platform.machine() == "x86_64"))'; then
    set -- --torch-backend cpu "$@"
fi
echo "installing $lock into $venv" >&2
"$uv" pip install --quiet --python "$venv/bin/python" "$@"
# The pages are built, and files checked, without the package itself.
[ "$venv" = .venv-docs ] || [ "$venv" = .venv-lint ] ||
    "$uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable .
