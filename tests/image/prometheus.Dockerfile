# Debian's Prometheus with the command line of prom/prometheus, for machines that cannot pull it.
ARG BASE_IMAGE=debian:trixie-slim
FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/* \
    && install -d -o nobody /prometheus
USER nobody
WORKDIR /prometheus
VOLUME /prometheus
ENTRYPOINT ["prometheus"]
