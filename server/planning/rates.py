"""Rates that a fleet asks of a server, from the figures of one device and of one query."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from edge_sdk.errors import ConfigurationError
from server.planning.figures import Figures, NetworkFigures
from server.planning.fleet import Fleet

DAY_S: Final = 86_400.0
MONTH_S: Final = 30 * DAY_S
# MQTT's header with a topic of 35 characters, and the acknowledgement of QoS 1
MQTT_BYTES: Final = 41 + 4
# IPv4 and TCP with time stamps (RFC 791, 9293, 7323), of a message and of what acknowledges it
TCP_BYTES: Final = 2 * (20 + 32)
# a record of TLS 1.3 with AES-GCM (RFC 8446): header, type and tag, in both directions
TLS_BYTES: Final = 2 * 22


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a fleet, or of the part of it that one server has.

    Attributes:
        devices_most: of one server; beyond: that number over the largest that was measured.
        query_s: of the processor for a query, in a backend. patience_s: the longest wait with
            which an offload keeps its deadline.
        control_share, broker_share: of a core, at the peak.
        server_mb, broker_mb: memory.
        daily: bytes a day, by what is sent. peak_bytes_per_s: of queries and replies.
    """

    devices: float
    peak_per_s: float
    devices_most: int
    beyond: float
    query_s: float
    patience_s: float
    control_share: float
    broker_share: float
    server_mb: float
    broker_mb: float
    daily: Mapping[str, float]
    peak_bytes_per_s: float
    _figures: Figures
    _fleet: Fleet

    @property
    def bytes_per_day(self) -> float:
        """Bytes a day of everything."""
        return sum(self.daily.values())

    def of_one(self, servers: int) -> Rates:
        """The rates of one of so many servers."""
        devices = math.ceil(self.devices / servers)
        shares = _shares(self._fleet, self._figures, devices)
        return replace(
            self,
            devices=devices,
            peak_per_s=self.peak_per_s / servers,
            control_share=shares[0],
            broker_share=shares[1],
            server_mb=_line(self._figures, "server", devices),
            broker_mb=_broker_mb(self._fleet, self._figures, devices),
        )


def rates_of(fleet: Fleet, figures: Figures) -> Rates:
    """The rates of a whole fleet.

    Raises: ConfigurationError.
    """
    network = figures.network(fleet.network)
    query_s = _query_s(fleet, figures, network)
    patience_s = fleet.deadline_ms / 1e3 - query_s
    if patience_s <= 0:
        raise ConfigurationError(
            f"deadline_ms: expected more than the {1e3 * query_s:.3g} ms that a query takes of the"
            f" processor, got {fleet.deadline_ms:g}; no answer could be in time"
        )
    most = _devices_most(fleet, figures)
    control, broker = _shares(fleet, figures, fleet.devices)
    sizes = _sizes(fleet, network)
    around = MQTT_BYTES + TCP_BYTES + (TLS_BYTES if fleet.tls else 0)
    asked, beats = fleet.offloads_per_s * DAY_S, fleet.beats_per_s * DAY_S
    daily = {
        "queries": asked * sizes["query"],
        "replies": asked * sizes["reply"],
        "heartbeats": beats * figures["heartbeat_bytes"].value,
        "bundles": fleet.devices * sizes["bundle"] * fleet.updates_per_month * DAY_S / MONTH_S,
        "headers of MQTT, TCP and TLS": (2 * asked + beats) * around,
    }
    return Rates(
        devices=fleet.devices,
        peak_per_s=fleet.peak_per_s,
        devices_most=most,
        beyond=most / (figures["server_device_s"].largest or math.inf),
        query_s=query_s,
        patience_s=patience_s,
        control_share=control,
        broker_share=broker,
        server_mb=_line(figures, "server", fleet.devices),
        broker_mb=_broker_mb(fleet, figures, fleet.devices),
        daily=daily,
        peak_bytes_per_s=fleet.peak_per_s * (sizes["query"] + sizes["reply"] + 2 * around),
        _figures=figures,
        _fleet=fleet,
    )


def _query_s(fleet: Fleet, figures: Figures, network: NetworkFigures) -> float:
    """Seconds of the processor that a backend takes for a query that is computed alone."""
    engine_s = network.batch_s[1] if fleet.service_ms is None else fleet.service_ms / 1e3
    return engine_s + figures["server_query_us"].value / 1e6


def _sizes(fleet: Fleet, network: NetworkFigures) -> dict[str, float]:
    if fleet.codec not in network.query:
        known = ", ".join(network.query)
        raise ConfigurationError(f"codec: expected one of {known}, got {fleet.codec}")
    query, bundle = fleet.query_bytes, fleet.bundle_bytes
    return {
        "query": network.query[fleet.codec] if query is None else query,
        "reply": network.reply,
        "bundle": network.bundle if bundle is None else bundle,
    }


def _shares(fleet: Fleet, figures: Figures, devices: float) -> tuple[float, float]:
    """Shares of a core that so many devices take of the server's own process, and of a broker.

    Heartbeats were measured every 30 s; housekeeping goes over all devices each second whatever
    they send, so that a longer interval is not counted as less.
    """
    often = max(1.0, 30.0 / fleet.heartbeat_s)
    control = figures["server_base_s"].value + devices * figures["server_device_s"].value * often
    queries = fleet.peak_per_s * devices / fleet.devices
    beats = devices / fleet.heartbeat_s
    broker_us = figures["broker_query_us"].value * queries + figures["broker_beat_us"].value * beats
    return control / 60, broker_us / 1e6


def _devices_most(fleet: Fleet, figures: Figures) -> int:
    """Devices with which the server's own process, and the broker, are busy as far as allowed."""
    base = figures["server_base_s"].value / 60
    control, broker = _shares(fleet, figures, fleet.devices)
    per_device = max((control - base) / fleet.devices, 1e-12)
    most = (fleet.busy_most - base) / per_device
    if broker:
        most = min(most, fleet.busy_most * fleet.devices / broker)
    return max(1, math.floor(most * (1 + 1e-9)))  # 3,999.9999... are 4,000


def _line(figures: Figures, name: str, devices: float) -> float:
    return figures[f"{name}_base_mb"].value + devices * figures[f"{name}_device_mb"].value


def _broker_mb(fleet: Fleet, figures: Figures, devices: float) -> float:
    name = "connection_tls_bytes" if fleet.tls else "connection_bytes"
    return figures["broker_base_mb"].value + devices * figures[name].value / 1e6
