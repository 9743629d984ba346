# Image of routers, of the model download and of the chart's test: no torch. `make images` builds it.
# PYTHON_DIGEST has no default: a build names the base that it was checked with. A base of your own needs `python` 3.11
# with venv, and `groupadd`, `useradd`.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG PYTHON_DIGEST

FROM ${PYTHON_IMAGE}@${PYTHON_DIGEST} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
RUN python -m venv /opt/baton
WORKDIR /src
# What is locked first, so that a change of Baton's own code keeps this layer.
COPY deploy/docker/requirements-router.txt deploy/docker/requirements-build.txt ./
RUN /opt/baton/bin/pip install --require-hashes --only-binary :all: -r requirements-router.txt
COPY pyproject.toml README.md ./
COPY baton baton
COPY kvtransfer kvtransfer
COPY services services
COPY loadgen loadgen
RUN python -m venv /tmp/build \
    && /tmp/build/bin/pip install --require-hashes --only-binary :all: -r requirements-build.txt \
    && /tmp/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . \
    && /opt/baton/bin/pip install --no-deps --no-index /tmp/wheel/*.whl \
    && /opt/baton/bin/python -m compileall -q /opt/baton/lib \
    && /opt/baton/bin/pip check \
    && /opt/baton/bin/baton --version

FROM ${PYTHON_IMAGE}@${PYTHON_DIGEST}
ARG VERSION=0.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="baton-router" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 50051 8001
STOPSIGNAL SIGTERM
ENTRYPOINT []
CMD ["baton", "router", "--config", "/etc/baton/router.yaml"]
