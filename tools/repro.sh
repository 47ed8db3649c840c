#!/bin/sh
# Run the pipeline of this host's preset, and print what it found. `make repro` and docker-compose.yml call it.
set -eu
folder=$(python tools/preset.py)
trap : INT # DVC has it too, and waits for its stage
dvc repro "${folder}dvc.yaml"
echo && sed '/^|/,$d' "${folder}reports/comparison.md"
echo "Table: ${folder}reports/comparison.md. Report: ${folder}reports/index.html."
