"""Bytes of heartbeats, queries, replies and bundles, by network, depth and codec."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from benchmarks.planning.networks import NETWORKS, Network, smashed
from benchmarks.reports import made_by, provenance, write
from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.manifest import CODECS
from edge_sdk.wire.codecs import encode
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Query, Reply, new_id, pack_query, pack_reply
from edge_sdk.wire.topics import Kind, Topic

NAME: Final = "planning-sizes"
COMMAND: Final = "python -m benchmarks.planning sizes"
ANSWERS: Final = 2_000  # of the agent whose heartbeat is weighed: its histograms are filled
SAMPLES: Final = 32


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes at one cut.

    Attributes:
        query: payload of an offload, by codec; the mean over random inputs.
        reply: payload of the answer.
        bundle: files of the bundle.
    """

    backbone: str
    depth: int
    input: int
    query: dict[str, float]
    reply: int
    bundle: int


def measure(results: Path) -> list[str]:
    """Weigh everything and write the report; its blocks."""
    with tempfile.TemporaryDirectory(prefix="splitedge-sizes-") as work:
        sizes = [size for one in NETWORKS for size in _sizes(one, Path(work) / one.backbone)]
        beat = _heartbeat(Path(work) / "tiny")
    topic = Topic("default", "device-0001", Kind.TELEMETRY)
    report = {
        "command": COMMAND,
        **provenance(),
        "heartbeat": {"start": beat[0], "later": beat[1], "topic": len(str(topic))},
        "sizes": [asdict(size) for size in sizes],
    }
    blocks = page(report)
    write(results / NAME, report, blocks)
    return blocks


def _sizes(network: Network, work: Path) -> Iterator[Size]:
    folder, manifest = network.export(work)
    reply = Reply(new_id(), {"logits": np.zeros((1, 10), np.float32)})
    weight = len(pack_reply(reply, manifest.name, manifest.version))
    for entry in smashed(folder, manifest, SAMPLES):
        query = {
            codec: float(np.mean([_query(manifest.name, entry.depth, row, codec) for row in rows]))
            for codec in CODECS
            if (rows := np.split(entry.array, SAMPLES))
        }
        bundle = folder / "bundles" / f"d{entry.depth}"
        files = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
        raw = 4 * int(np.prod(network.shape))
        yield Size(network.backbone, entry.depth, raw, query, weight, files)


def _query(model: str, depth: int, row: Any, codec: Any) -> int:
    array, parameters = encode(row, codec)
    tensor = Tensor(f"z{depth}", array, parameters)
    return len(pack_query(Query(new_id(), model, "1", tensor, 1_000.0)))


def _heartbeat(work: Path) -> tuple[int, int]:
    """Bytes of an agent's first heartbeat, and of one after ANSWERS answers."""
    bundle = next(work.glob("*/1/bundles/d2"))
    inputs = np.random.default_rng(4).normal(size=(ANSWERS, 1, 8, 8)).astype(np.float32)
    with EdgeAgent.from_bundle(bundle, AgentSettings(offload=False)) as agent:
        before = len(orjson.dumps(agent.telemetry()))
        for x in inputs:
            agent.predict(x)
        return before, len(orjson.dumps(agent.telemetry()))


def page(report: dict[str, Any]) -> list[str]:
    """The report's text."""
    codecs: Sequence[str] = list(report["sizes"][0]["query"])
    lines = [
        f"| network | depth | input | {' | '.join(codecs)} | reply | bundle |",
        "|---" * (5 + len(codecs)) + "|",
    ]
    for size in report["sizes"]:
        queries = " | ".join(f"{size['query'][codec]:,.0f}" for codec in codecs)
        lines.append(
            f"| {size['backbone']} | {size['depth']} | {size['input']:,} | {queries} |"
            f" {size['reply']:,} | {size['bundle']:,} |"
        )
    beat = report["heartbeat"]
    return [
        "# Bytes of messages and bundles",
        (
            "Payloads as they are published over MQTT: a query of one sample by codec, and its"
            f" reply of ten classes. Networks have random weights, and a figure is the mean over"
            f" {SAMPLES} random inputs; input: the raw sample as float32; bundle: all its files."
            " The MQTT header with the topic, TCP, IP and TLS come on top."
        ),
        "\n".join(lines),
        (
            f"A heartbeat has {beat['start']:,} bytes at the agent's start and {beat['later']:,}"
            f" after {ANSWERS:,} answers, of a device that sends no queries."
        ),
        made_by(report),
    ]
