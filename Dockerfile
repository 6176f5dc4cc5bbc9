# One image for the whole service: Debian's Python and the packages that have no wheel on every board, the rest from wheels.
ARG BASE_IMAGE=debian:trixie-slim

FROM ${BASE_IMAGE} AS base
# python3-soundfile and -numpy: no wheels for arm/v7. OpenBLAS by name: NumPy alone brings the reference BLAS,
# 30 times slower. NumPy's own tests are 15 MB.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates python3 python3-numpy python3-soundfile libopenblas0-pthread \
    && find /usr/lib/python3/dist-packages/numpy -type d -name tests -prune -exec rm -r {} + \
    && apt-get clean && rm -rf /var/lib/apt/lists/*

FROM base AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv --system-site-packages /opt/thimble
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY engine ./engine
COPY service ./service
RUN /opt/thimble/bin/pip install --no-cache-dir --only-binary=:all: --no-binary=thimble-stt .

FROM base
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin thimble \
    && install -d -o thimble -g thimble -m 0750 /data
COPY --from=build /opt/thimble /opt/thimble
ENV PATH=/opt/thimble/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    THIMBLE_DATA_DIR=/data \
    THIMBLE_HOST=0.0.0.0
USER thimble
WORKDIR /data
VOLUME /data
EXPOSE 8000
# In bash alone: a Python takes 10 MB of the service's limit and 0.1 s of a desktop core each time.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s CMD ["bash", "-c", \
    "exec 3<>/dev/tcp/127.0.0.1/${THIMBLE_PORT:-8000} && printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&3 && read -rt 4 line <&3 && [[ $line == *' 200 '* ]]"]
ENTRYPOINT ["python3", "-m", "service"]
