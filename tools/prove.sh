#!/usr/bin/env bash
# Prove a commit as the gate will: .ci/run in a fresh clone, with an empty home, no input, and neither a Docker engine nor
# Compose nor a browser on the PATH. What a host needs to reach its package index is kept.
# Usage: tools/prove.sh [COMMIT]; BUSY=3 runs so many busy loops beside it, since nothing may depend on speed.
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$(git rev-parse --verify "${1:-HEAD}^{commit}")
folder=$(mktemp -d -t samebits-prove-XXXXXX)
loops=()
finish() {
    for pid in "${loops[@]}"; do kill "$pid" 2>/dev/null || :; done
    rm -rf "$folder"
}
trap finish EXIT
mkdir "$folder/bin" "$folder/home" "$folder/tmp"
IFS=: read -ra paths <<<"$PATH"
for path in "${paths[@]}"; do
    case $path in "$PWD"/*) continue ;; esac # an environment of this clone
    for file in "$path"/*; do
        case ${file##*/} in
        docker* | compose* | containerd* | runc | podman* | chrom* | google-chrome* | firefox*) ;;
        *) [ -x "$file" ] && [ ! -e "$folder/bin/${file##*/}" ] && ln -s "$file" "$folder/bin/" ;;
        esac
    done
done
git clone --quiet --no-local . "$folder/samebits"
cd "$folder/samebits"
git checkout --quiet -B main "$commit"
kept=()
for name in PIP_CERT PIP_FIND_LINKS PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE UV_INDEX_URL UV_DEFAULT_INDEX \
    SSL_CERT_FILE REQUESTS_CA_BUNDLE http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [ -n "${!name:-}" ] && kept+=("$name=${!name}")
done
for ((i = 0; i < ${BUSY:-0}; i++)); do
    (while :; do :; done) &
    loops+=($!)
done
env -i CI=true HOME="$folder/home" PATH="$folder/bin" TMPDIR="$folder/tmp" LANG=C.UTF-8 "${kept[@]}" \
    setsid --wait bash .ci/run </dev/null
