# Two images, `cpu` (built without --target) and `cuda`; docs/operations/README.md, "Image", says how. Nothing is compiled
# when they run: `whippet prebuild` did. `make image-proof` runs the steps of `cpu` without a container engine, and serves.

# Debian 12 by its digest, as debian:bookworm-slim@sha256:…; there is no default, so that nobody builds on a tag.
ARG BASE

FROM ${BASE} AS python
# Versions are those of the base's own suite, which its digest does not fix: security updates are wanted.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/*

FROM python AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
# One environment has pip and what makes our wheel. Another one is shipped, without pip. The third sees all of that, and
# has what exporting the embedder needs besides.
COPY requirements/build.txt /build/requirements/
RUN python3 -m venv /build/venv \
 && /build/venv/bin/pip install --no-cache-dir --require-hashes --no-deps --requirement /build/requirements/build.txt \
 && python3 -m venv --without-pip /opt/whippet/venv \
 && python3 -m venv --without-pip /build/maker \
 && echo /opt/whippet/venv/lib/python3.11/site-packages >/build/maker/lib/python3.11/site-packages/shipped.pth

FROM build AS wheel
COPY LICENSE README.md pyproject.toml /build/whippet/
COPY service /build/whippet/service
COPY engine /build/whippet/engine
COPY cache /build/whippet/cache
COPY quant /build/whippet/quant
COPY bench /build/whippet/bench
RUN /build/venv/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /build/wheels /build/whippet

# The two differ in their requirements, and in where PyTorch comes from: wheels for a CPU lie apart from all others.
FROM build AS built-cpu
ARG TORCH_WHEELS
COPY requirements/cpu.txt /build/requirements/
RUN /build/venv/bin/pip --python /opt/whippet/venv/bin/python install --no-cache-dir --only-binary :all: \
    --require-hashes --no-deps ${TORCH_WHEELS:+--find-links "${TORCH_WHEELS}"} --requirement /build/requirements/cpu.txt
COPY --from=wheel /build/wheels /build/wheels
RUN /build/venv/bin/pip --python /opt/whippet/venv/bin/python install --no-cache-dir --no-index --no-deps \
    /build/wheels/*.whl
COPY requirements/embedder.txt /build/requirements/
RUN /build/venv/bin/pip --python /build/maker/bin/python install --no-cache-dir --only-binary :all: \
    --require-hashes --no-deps --requirement /build/requirements/embedder.txt \
 && /build/maker/bin/python -m service.cli prebuild --into /opt/whippet/prebuilt --embedder

FROM build AS built-cuda
COPY requirements/cuda.txt /build/requirements/
RUN /build/venv/bin/pip --python /opt/whippet/venv/bin/python install --no-cache-dir --only-binary :all: \
    --require-hashes --no-deps --requirement /build/requirements/cuda.txt
COPY --from=wheel /build/wheels /build/wheels
RUN /build/venv/bin/pip --python /opt/whippet/venv/bin/python install --no-cache-dir --no-index --no-deps \
    /build/wheels/*.whl
COPY requirements/embedder.txt /build/requirements/
RUN /build/venv/bin/pip --python /build/maker/bin/python install --no-cache-dir --only-binary :all: \
    --require-hashes --no-deps --requirement /build/requirements/embedder.txt
# A model's config says which kernels its server asks for; the GPUs of these architectures need not be here.
ARG KERNELS_FOR=models/demo-awq
ARG KERNELS_ARCH=sm_80,sm_86,sm_89,sm_90,sm_100,sm_120
COPY ${KERNELS_FOR}/*.json /build/model/
RUN /build/maker/bin/python -m service.cli prebuild --into /opt/whippet/prebuilt --embedder \
    --model /build/model --arch "${KERNELS_ARCH}"

# What is in them, as CycloneDX: docker build --target sbom-cpu --output FOLDER …
FROM built-cpu AS billed-cpu
COPY scripts/sbom.py /build/scripts/
WORKDIR /build
RUN /opt/whippet/venv/bin/python -m scripts.sbom >/build/sbom.json

FROM scratch AS sbom-cpu
COPY --from=billed-cpu /build/sbom.json /

FROM built-cuda AS billed-cuda
COPY scripts/sbom.py /build/scripts/
WORKDIR /build
RUN /opt/whippet/venv/bin/python -m scripts.sbom >/build/sbom.json

FROM scratch AS sbom-cuda
COPY --from=billed-cuda /build/sbom.json /

FROM python AS runtime
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="whippet" \
      org.opencontainers.image.description="A gRPC streaming server for one language model" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY models/demo /opt/whippet/models/demo
COPY models/demo-awq /opt/whippet/models/demo-awq
# Whatever modes the checkout had. A volume takes over the owner of the folder that it covers.
RUN chmod -R u=rwX,go=rX /opt/whippet \
 && install --directory --owner 10001 --group 10001 --mode 0755 /var/cache/whippet
# The C library's threads keep less for themselves, so that memory goes back to the system after a flood.
ENV PATH=/opt/whippet/venv/bin:/usr/local/bin:/usr/bin:/bin \
    GLIBC_TUNABLES=glibc.malloc.tcache_max=128 \
    PYTHONDONTWRITEBYTECODE=1 \
    WHIPPET_PREBUILT_DIR=/opt/whippet/prebuilt
USER 10001:10001
# Data, admin, health, metrics.
EXPOSE 50051 50052 50053 9090
VOLUME /var/cache/whippet
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["whippet", "health"]
ENTRYPOINT ["whippet"]
# The demo model, to anybody who reaches the data port; a model of yours wants arguments of its own.
CMD ["serve", "--model", "/opt/whippet/models/demo-awq", "--cache-dir", "/var/cache/whippet/kept", \
     "--listen", "0.0.0.0:50051", "--health-listen", "0.0.0.0:50053", "--metrics-listen", "0.0.0.0:9090", \
     "--insecure", "true"]

FROM runtime AS cuda
COPY --from=built-cuda /opt/whippet/venv /opt/whippet/venv
COPY --from=built-cuda /opt/whippet/prebuilt /opt/whippet/prebuilt
# What the container toolkit brings in: the driver's library, and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime AS cpu
COPY --from=built-cpu /opt/whippet/venv /opt/whippet/venv
COPY --from=built-cpu /opt/whippet/prebuilt /opt/whippet/prebuilt
