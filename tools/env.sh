#!/bin/sh
# Print what docker-compose.yml cannot know: whose files these are, where they lie, which image fits the locks.
# Usage: sh tools/env.sh > .env
set -eu
cd "$(dirname "$0")/.."
uid=$(id -u) gid=$(id -g)
# Files that root makes in somebody's clone belong to that somebody.
[ "$uid" -ne 0 ] || { uid=$(stat -c %u .) gid=$(stat -c %g .); }
tag() {
    printf '%s-%s' "$1" "$(cat Dockerfile requirements.uv.lock "requirements.$1.lock" | sha256sum | cut -c 1-12)"
}
id_of() {
    docker image inspect --format '{{.Id}}' "$1" 2>/dev/null || :
}
gpu=samebits:$(tag gpu) cpu=samebits:$(tag cpu)
revision=$(git -c safe.directory="$(pwd)" rev-parse HEAD 2>/dev/null || echo unknown)
cat <<END
SAMEBITS_UID=$uid
SAMEBITS_GID=$gid
SAMEBITS_ROOT=$(pwd -P)
SAMEBITS_GPU_IMAGE=$gpu
SAMEBITS_GPU_IMAGE_ID=$(id_of "$gpu")
SAMEBITS_CPU_IMAGE=$cpu
SAMEBITS_CPU_IMAGE_ID=$(id_of "$cpu")
SAMEBITS_REVISION=$revision
END
