# The image that experiments run in. Both of Docker's builders can build it: nothing here needs BuildKit.
# torch's wheels carry CUDA's libraries, so the base flavour, which has the driver's interface alone, is enough.
ARG BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04@sha256:2ab6381d970b211fb93853796dc6707eb8a72575a375c422b17cf4d8b2641701

FROM ${BASE_IMAGE}
SHELL ["/bin/sh", "-euc"]
# git is DVC's; the compilers are torch.compile's; tini is Compose's. Archives keep one version of a package, so none is named: the
# image's id says which it was.
# hadolint ignore=DL3008
RUN export DEBIAN_FRONTEND=noninteractive; \
    apt-get update -qq; \
    apt-get install -y -qq --no-install-recommends ca-certificates g++ git python3-dev python3-venv tini; \
    rm -rf /var/lib/apt/lists/*

# Packages alone, from a lock: this layer stays until the lock changes. `wheels/` may hold files that no index has.
# One stage, because a copy of these gigabytes from another would double them.
ARG LOCK=gpu
ARG TORCH_BACKEND=
COPY requirements.uv.lock requirements.${LOCK}.lock wheels* /opt/locks/
RUN python3 -m venv /opt/uv; \
    /opt/uv/bin/pip install --quiet --no-cache-dir --disable-pip-version-check --require-hashes \
        --requirement /opt/locks/requirements.uv.lock; \
    set -- --require-hashes --requirement "/opt/locks/requirements.${LOCK}.lock" --find-links /opt/locks; \
    [ -z "${TORCH_BACKEND}" ] || set -- --torch-backend "${TORCH_BACKEND}" "$@"; \
    /opt/uv/bin/uv venv --quiet --no-cache --python python3 /opt/samebits; \
    /opt/uv/bin/uv pip install --quiet --no-cache --link-mode copy --compile-bytecode \
        --python /opt/samebits/bin/python "$@"; \
    rm -rf /opt/uv

# Any uid may run this: a home and a place for MLflow's store that everybody can write to, and a name for who has none,
# also for git, which DVC's experiments are kept in.
RUN install -d -m 1777 /home/samebits /mlflow; \
    printf '[safe]\n\tdirectory = *\n[user]\n\tname = samebits\n\temail = samebits@localhost\n' > /etc/gitconfig
ENV PATH=/opt/samebits/bin:$PATH \
    HOME=/home/samebits \
    USER=samebits \
    LOGNAME=samebits \
    DVC_SITE_CACHE_DIR=/tmp/dvc \
    PYTHONDONTWRITEBYTECODE=1
# The kit itself comes last and without its packages, so that an edit rebuilds nothing but this.
WORKDIR /opt/src
COPY pyproject.toml README.md ./
COPY src ./src
RUN uv pip install --quiet --no-cache --offline --python /opt/samebits/bin/python --no-deps --no-build-isolation \
        --compile-bytecode --editable .
ARG BASE_IMAGE
ARG REVISION=unknown
LABEL org.opencontainers.image.title="samebits" \
      org.opencontainers.image.description="What DataParallel and DistributedDataParallel buy, and the same bits anywhere" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      samebits.lock="${LOCK}"
ENV SAMEBITS_CONTAINER=1 \
    SAMEBITS_IMAGE_BASE="${BASE_IMAGE}"
USER 1000:1000
CMD ["samebits", "doctor"]
