# Image of workers, of the supervisor and of Ray: torch with CUDA, NCCL and Triton from their wheels; the driver comes
# from the node. `make images` builds it.
# PYTHON_DIGEST has no default: a build names the base that it was checked with. Kernels that were compiled beforehand
# (`baton model compile`) come with `--build-context kernels=DIR`, which takes the place of the stage of that name.
# `--build-arg LOCK=worker-cpu --build-context wheels=DIR` makes an image without CUDA: DIR has the CPU wheel of torch,
# which is published apart from the others.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG PYTHON_DIGEST

FROM scratch AS kernels
COPY deploy/docker/kernels /

FROM scratch AS wheels
COPY deploy/docker/wheels /

FROM ${PYTHON_IMAGE}@${PYTHON_DIGEST} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
RUN python -m venv /opt/baton
WORKDIR /src
# What is locked first: torch and CUDA are gigabytes, and change seldom.
ARG LOCK=worker
COPY deploy/docker/requirements-${LOCK}.txt deploy/docker/requirements-build.txt ./
RUN --mount=type=bind,from=wheels,target=/wheels \
    /opt/baton/bin/pip install --require-hashes --only-binary :all: --find-links /wheels -r "requirements-${LOCK}.txt"
COPY pyproject.toml README.md ./
COPY baton baton
COPY kvtransfer kvtransfer
COPY services services
COPY loadgen loadgen
RUN python -m venv /tmp/build \
    && /tmp/build/bin/pip install --require-hashes --only-binary :all: -r requirements-build.txt \
    && /tmp/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . \
    && /opt/baton/bin/pip install --no-deps --no-index /tmp/wheel/*.whl \
    && /opt/baton/bin/pip check \
    && /opt/baton/bin/baton --version

FROM ${PYTHON_IMAGE}@${PYTHON_DIGEST}
ARG VERSION=0.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="baton-worker" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Triton compiles a C stub for each kernel; verbs are for NCCL over RDMA. Debian deletes old versions of its packages,
# so a build that named them would soon fail.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin baton
COPY --from=build /opt/baton /opt/baton
# A worker copies them into the kernel cache of its configuration where that has none.
COPY --from=kernels --chown=10001:10001 / /opt/kernels
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility BATON_KERNELS=/opt/kernels
USER 10001:10001
WORKDIR /tmp
EXPOSE 8001 50060 50100 50140 9400
STOPSIGNAL SIGTERM
ENTRYPOINT []
CMD ["baton", "worker", "group", "--prefill", "1", "--decode", "1", "--config", "/etc/baton/workers.yaml"]
