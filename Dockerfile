# One image for linux/amd64, linux/arm64 and linux/arm/v7: Debian's Python and the packages that have no wheel on every board,
# the rest from wheels pinned in deploy/requirements.txt. The three differ in nothing but the processor.
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
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv python3-setuptools \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv --system-site-packages /opt/thimble
ENV PATH=/opt/thimble/bin:$PATH
WORKDIR /src
COPY deploy/requirements.txt ./
RUN pip install --no-cache-dir --no-deps --require-hashes --only-binary=:all: -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY engine ./engine
COPY service ./service
# Debian's setuptools builds it: nothing is fetched that is not pinned.
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
# A model baked in (--build-arg MODEL=tiny.en) needs no network at first start and no room in the volume.
ARG MODEL=
RUN if [ -n "$MODEL" ]; then thimble fetch "$MODEL" --dir /opt/thimble/share/thimble/models; fi

FROM base
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin thimble \
    && install -d -o thimble -g thimble -m 0750 /data
COPY --from=build /opt/thimble /opt/thimble
ARG MODEL=
ENV PATH=/opt/thimble/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    THIMBLE_DATA_DIR=/data \
    THIMBLE_HOST=0.0.0.0 \
    THIMBLE_MODEL=${MODEL:-tiny.en}
USER thimble
WORKDIR /data
VOLUME /data
EXPOSE 8000
# In bash alone: a Python takes 10 MB of the service's limit and 0.1 s of a desktop core each time.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s CMD ["bash", "-c", \
    "exec 3<>/dev/tcp/127.0.0.1/${THIMBLE_PORT:-8000} && printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&3 && read -rt 4 line <&3 && [[ $line == *' 200 '* ]]"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python3", "-m", "service"]
