#!/bin/sh
# Run the pipeline of this host's preset, and print what it found. `make repro` and docker-compose.yml call it.
set -eu
folder=$(python tools/preset.py)
exec samebits repro --folder "${folder:-.}"
