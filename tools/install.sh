#!/bin/sh
# Make an environment and install one lock into it. Usage: tools/install.sh PYTHON LOCK FOLDER
# uv is taken from the PATH, else installed into the environment by pip, from its own lock.
set -eu
python=$1 lock=$2 venv=$3
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
    echo "error: $("$python" --version 2>&1) found, 3.11 to 3.13 needed. hint: make PYTHON=python3.12 ..." >&2
    exit 3
}
if command -v uv >/dev/null 2>&1; then
    uv=uv
    [ -x "$venv/bin/python" ] || uv venv --quiet --python "$python" "$venv"
else
    uv=$venv/bin/uv
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
        echo "error: $python cannot make a virtual environment. hint: apt install python3-venv, or install uv" >&2
        exit 3
    }
    [ -x "$uv" ] || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes \
        -r requirements.uv.lock
fi
# uv does not read pip's setting of a folder with wheels.
links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
set -- --require-hashes -r "$lock"
if ! grep -q '+cpu' "$lock"; then
    : # CUDA's torch, or none: an index has it
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
