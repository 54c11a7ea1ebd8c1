# The agent of a device: docker build -f deploy/agent.Dockerfile -t splitedge-agent .
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN python -m venv /opt/splitedge \
    && /opt/splitedge/bin/pip install --no-cache-dir --constraint constraints.txt '.[serve]'

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/splitedge splitedge
COPY --from=build /opt/splitedge /opt/splitedge
ENV PATH=/opt/splitedge/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /var/lib/splitedge
VOLUME /var/lib/splitedge
# the agent answers over its own socket; until it is enrolled the container is not healthy
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["python", "-P", "-c", \
    "from pathlib import Path; from edge_sdk.service.client import RunningAgent; RunningAgent(Path('agent')).status()"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["splitedge", "agent"]
CMD ["run", "--state", "agent"]
