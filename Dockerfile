# An image whose entry point is the command `solo`, run by a user without rights. docs/cloud.md says how it was tried.
#   docker build --tag solorl .                                                      torch for the CPU
#   docker build --tag solorl --build-arg TORCH_INDEX=https://pypi.org/simple .      torch for CUDA, several GB
#   docker build --tag solorl --build-arg EXTRAS=jax,envpool .                       with extras of pyproject.toml
# Debian 12 has Python 3.11, for which requirements.lock was resolved and with which results are measured.
ARG BASE=debian:bookworm-slim

# libegl1 and the two after it: MuJoCo draws films without a screen.
FROM ${BASE} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates libegl1 libgl1 libgl1-mesa-dri python3 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --home-dir /solo --uid 1000 solo

FROM base AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
# The layer of the packages, by far the largest, is built again only where the lock changes.
COPY requirements.lock /build/
RUN python3 -m venv /opt/solorl \
    && /opt/solorl/bin/pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" --requirement /build/requirements.lock
COPY pyproject.toml README.md LICENSE /build/
COPY solorl /build/solorl
COPY algorithms /build/algorithms
COPY benchmark/spaces /build/benchmark/spaces
COPY docs/algorithms /build/docs/algorithms
RUN /opt/solorl/bin/pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" \
        --constraint /build/requirements.lock "/build${EXTRAS:+[${EXTRAS}]}" \
    && /opt/solorl/bin/pip uninstall --yes pip

# For .devcontainer: tools, no packages; `make .venv/.dev` installs them into the checkout.
FROM base AS dev
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make openssh-client procps python3-venv \
    && rm -rf /var/lib/apt/lists/*
USER 1000:1000

FROM base AS run
COPY --from=build /opt/solorl /opt/solorl
# Pictures are drawn without a screen; Docker's NVIDIA runtime gives compute to containers that are given a GPU.
ENV PATH=/opt/solorl/bin:$PATH PYTHONUNBUFFERED=1 SDL_VIDEODRIVER=dummy NVIDIA_DRIVER_CAPABILITIES=compute,utility
# A number, so that Kubernetes can see that it is not root.
USER 1000:1000
WORKDIR /solo
# tini passes signals on and collects processes that have ended; `solo` as process 1 would have to do both.
ENTRYPOINT ["tini", "--", "solo"]
CMD ["--help"]
