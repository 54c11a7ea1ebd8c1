"""One device of the demo, as a process: orders on stdin, answers as JSON lines on stdout.

local       classify every sample on the device alone
gated       classify every sample: exit on the device, or ask the server
stream      classify samples without end, until `stop`
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from edge_sdk import AgentSettings, EdgeAgent, Prediction
from edge_sdk.bundles.store import BundleStore
from edge_sdk.session import Array

# pace of a sensor: an outage of seconds then has hundreds of predictions, not millions
STREAM_PAUSE_S = 0.01


def main() -> int:
    """Execute orders until stdin closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True)
    options = parser.parse_args()
    samples: Array = np.load(options.samples, allow_pickle=False)
    settings = AgentSettings(heartbeat_s=2.0)
    with EdgeAgent.open(options.state, settings) as agent:
        manifest = agent.manifest
        _say({"ready": True, "depth": manifest.depth, "threshold": manifest.gate.threshold})
        for line in sys.stdin:
            match line.strip():
                case "local":
                    _say(_local(options.state, samples))
                case "gated":
                    _say(_gated(agent, samples))
                case "stream":
                    _say(_stream(agent, samples))
    return 0


def _local(state: Path, samples: Array) -> dict[str, Any]:
    # without a server nothing is offloaded: every answer is the exit head's
    with EdgeAgent.from_bundle(BundleStore(state).active().folder) as alone:
        return {"labels": [alone.predict(sample).label for sample in samples]}


def _gated(agent: EdgeAgent, samples: Array) -> dict[str, Any]:
    before = agent.status()
    answers = [agent.predict(sample) for sample in samples]
    after = agent.status()
    return {
        "labels": [answer.label for answer in answers],
        "sources": [answer.source for answer in answers],
        "latencies_ms": [answer.latency_ms for answer in answers],
        "bytes_up": after.bytes_up - before.bytes_up,
    }


def _stream(agent: EdgeAgent, samples: Array) -> dict[str, Any]:
    stop = threading.Event()

    def wait_for_stop() -> None:
        sys.stdin.readline()
        stop.set()

    waiting = threading.Thread(target=wait_for_stop)
    waiting.start()
    _say({"streaming": True})
    rows: list[tuple[float, str, float]] = []
    errors: list[str] = []
    at = 0
    while not stop.wait(STREAM_PAUSE_S):
        start = time.monotonic()
        try:
            answer: Prediction = agent.predict(samples[at % len(samples)])
            rows.append((start, answer.source, answer.latency_ms))
        except Exception as err:  # noqa: BLE001 - the demo counts every error that a user would meet
            errors.append(f"{type(err).__name__}: {err}")
        at += 1
    waiting.join()
    return {"rows": rows, "errors": errors, "deadline_ms": 1e3 * AgentSettings().deadline_s}


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
