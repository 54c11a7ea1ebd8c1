# The server, and a Mosquitto for it: docker build -f deploy/server.Dockerfile -t splitedge-server .
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY . .
# torch comes first, in a step of its own; it has no CUDA where pip finds an index of CPU builds (README.md)
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv /opt/splitedge \
    && /opt/splitedge/bin/pip install --no-cache-dir --constraint constraints.txt torch \
    && /opt/splitedge/bin/pip install --no-cache-dir --constraint constraints.txt '.[server,s3]'

FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends mosquitto \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home --home-dir /var/lib/splitedge splitedge \
    && install -d -o splitedge -g splitedge /mosquitto /keys
COPY --from=build /opt/splitedge /opt/splitedge
ENV PATH=/opt/splitedge/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /var/lib/splitedge
VOLUME /var/lib/splitedge
EXPOSE 8000 1883
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s CMD ["python", "-P", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/live', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["splitedge", "server"]
CMD ["run", "--state", "server", "--http", "0.0.0.0:8000", "--insecure"]
