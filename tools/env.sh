#!/bin/sh
# Write .env, for what docker-compose.yml cannot know: where this folder and git's lie, which image fits the locks.
# Other lines of .env stay. Usage: sh tools/env.sh
set -eu
cd "$(dirname "$0")/.."
root=$(pwd -P)
owner=$(stat -c %u:%g .) memlock=-1
gid=${owner#*:}
# To a rootless engine the caller is root inside, and limits cannot be raised.
case $(docker info --format '{{.SecurityOptions}}' 2>/dev/null) in *rootless*)
    gid=0
    limit=$(prlimit --noheadings --raw --output HARD --memlock)
    [ "$limit" = unlimited ] || memlock=$limit
    ;;
esac
case $(uname -m) in
x86_64) architecture= ;;
aarch64) architecture=arm64- ;;
*) architecture=$(uname -m)- ;;
esac
tag() {
    printf '%s-%s' "$1" "$architecture$(cat Dockerfile requirements.uv.lock "requirements.$1.lock" | sha256sum | cut -c 1-12)"
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
revision=$(git -c safe.directory="$root" rev-parse HEAD 2>/dev/null || echo unknown)
# Of a worktree or a submodule, git's own folder is elsewhere.
git=$(git -c safe.directory="$root" rev-parse --path-format=absolute --git-common-dir 2>/dev/null || echo "$root")
ours='COMPOSE_PROJECT_NAME=|SAMEBITS_((UID|GID|PULL_POLICY|ROOT|GIT|REVISION|MEMLOCK|CONTAINER_TOOLKIT)=|(GPU|CPU)_IMAGE)'
new=$(mktemp .env.XXXXXX)
trap 'rm -f "$new"' EXIT
# A name of its own, because two clones in folders of one name would be one project.
cat > "$new" <<END
COMPOSE_PROJECT_NAME=samebits-$(printf %s "$root" | sha256sum | cut -c 1-8)
SAMEBITS_GID=$gid
SAMEBITS_PULL_POLICY=missing
SAMEBITS_ROOT=$root
SAMEBITS_GIT=$git
SAMEBITS_GPU_IMAGE=$gpu
SAMEBITS_GPU_IMAGE_ID=$(id_of "$gpu")
SAMEBITS_GPU_IMAGE_DIGEST=$(digest_of "$gpu")
SAMEBITS_CPU_IMAGE=$cpu
SAMEBITS_CPU_IMAGE_ID=$(id_of "$cpu")
SAMEBITS_CPU_IMAGE_DIGEST=$(digest_of "$cpu")
SAMEBITS_CONTAINER_TOOLKIT=$toolkit
SAMEBITS_MEMLOCK=$memlock
SAMEBITS_REVISION=$revision
END
# The engine has neither NVIDIA's runtime nor its hook, and describes GPUs as devices.
by_device_interface() {
    ! command -v nvidia-container-runtime-hook >/dev/null || return 1
    case $(docker info --format '{{json .Runtimes}}' 2>/dev/null) in '' | *'"nvidia"'*) return 1 ;; esac
    for folder in $(docker info --format '{{range .CDISpecDirs}}{{.}} {{end}}' 2>/dev/null); do
        ! grep -qs 'nvidia\.com/gpu' "$folder"/*.yaml "$folder"/*.json || return 0
    done
    return 1
}
[ ! -f .env ] || grep -Ev "^($ours|COMPOSE_FILE=docker-compose.yml:docker-compose.(cpu|cdi).yml$)" .env >> "$new" || :
# Plain `docker compose` takes the overlay for what this host has.
if ! grep -q '^COMPOSE_FILE=' "$new"; then
    overlay=
    if ! nvidia-smi -L >/dev/null 2>&1; then overlay=cpu; elif by_device_interface; then overlay=cdi; fi
    [ -z "$overlay" ] || echo "COMPOSE_FILE=docker-compose.yml:docker-compose.$overlay.yml" >> "$new"
fi
chown "$owner" "$new" 2>/dev/null || :
mv "$new" .env
