#!/bin/sh
# Print what docker-compose.yml cannot know: whose files these are, where they lie, which image fits the locks.
# Usage: sh tools/env.sh > .env
set -eu
cd "$(dirname "$0")/.."
uid=$(id -u) gid=$(id -g)
# Files that root makes in somebody's clone belong to that somebody.
[ "$uid" -ne 0 ] || { uid=$(stat -c %u .) gid=$(stat -c %g .); }
# To a rootless engine the caller is root inside.
case $(docker info --format '{{.SecurityOptions}}' 2>/dev/null) in *rootless*) uid=0 gid=0 ;; esac
tag() {
    printf '%s-%s' "$1" "$(cat Dockerfile requirements.uv.lock "requirements.$1.lock" | sha256sum | cut -c 1-12)"
}
known() {
    docker image inspect --format "$1" "$2" 2>/dev/null || :
}
id_of() {
    known '{{.Id}}' "$1"
}
digest_of() {
    # shellcheck disable=SC2016 # a template of Docker's
    known '{{range $i, $digest := .RepoDigests}}{{if not $i}}{{$digest}}{{end}}{{end}}' "$1"
}
gpu=samebits:$(tag gpu) cpu=samebits:$(tag cpu)
toolkit=$(nvidia-ctk --version 2>/dev/null | sed -n 's/.* \([0-9]*\.[0-9]*\.[0-9]*\).*/\1/p' | head -n 1)
[ -n "$(id_of "$gpu")$(id_of "$cpu")" ] ||
    echo "no image yet: make .env again when it is built, so that runs record which it was (\`make up\` does)" >&2
revision=$(git -c safe.directory="$(pwd)" rev-parse HEAD 2>/dev/null || echo unknown)
cat <<END
SAMEBITS_UID=$uid
SAMEBITS_GID=$gid
SAMEBITS_ROOT=$(pwd -P)
SAMEBITS_GPU_IMAGE=$gpu
SAMEBITS_GPU_IMAGE_ID=$(id_of "$gpu")
SAMEBITS_GPU_IMAGE_DIGEST=$(digest_of "$gpu")
SAMEBITS_CPU_IMAGE=$cpu
SAMEBITS_CPU_IMAGE_ID=$(id_of "$cpu")
SAMEBITS_CPU_IMAGE_DIGEST=$(digest_of "$cpu")
SAMEBITS_CONTAINER_TOOLKIT=$toolkit
SAMEBITS_REVISION=$revision
END
