"""Settings of an agent: frozen records with units in the names, checked when built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

from edge_sdk.checks import check_fields, check_value, make_plain, need
from edge_sdk.errors import ConfigurationError
from edge_sdk.gate_form import read_gate
from edge_sdk.manifest import CODECS, Codec
from edge_sdk.providers.names import AUTO
from edge_sdk.providers.names import SETTINGS as PROVIDERS
from profiles.checks import flag, number, one_of, optional, whole
from profiles.errors import InvalidProfileError

if TYPE_CHECKING:
    from profiles.energy import PowerModel

GRID_SIZE: Final = 10
# audits that a choice of the threshold looks back on
AUDIT_WINDOW: Final = 2000
SECONDS: Final = number(above=0, most=600)
# the URL of traces that the environment names, as OpenTelemetry's own programs read it
TRACES_OF_ENVIRONMENT: Final = "env"
TRACES_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Budget:
    """Sets the threshold so that offloads stay under a limit: see `BudgetController` in
    edge_sdk.gate.controllers.

    Attributes:
        limit: per prediction or per second, in the unit of `cost`: by default the share of
            predictions that may offload, in [0, 1].
        cost: of one offload: 1 to limit their number, else its bytes or joules.
        per: whether the limit holds per prediction or per second.
        floor: an uncertainty below it is never offloaded, even within the budget.
    """

    limit: float
    cost: float = 1.0
    per: Literal["prediction", "second"] = "prediction"
    floor: float = -math.inf

    def __post_init__(self) -> None:
        check_budget(limit=self.limit, cost=self.cost, per=self.per, floor=self.floor)
        make_plain(self)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Sets the threshold so that exits agree with the server: see `AgreementController` in
    edge_sdk.gate.controllers.

    Attributes:
        delta: share of the exits for which the server may give another label, in (0, 1).
        confidence: of that bound, in (0, 1).
        audit_share: share of the queries compared with the server in the background, in (0, 1].
    """

    delta: float
    confidence: float = 0.95
    audit_share: float = 0.02

    def __post_init__(self) -> None:
        check_agreement(
            delta=self.delta,
            confidence=self.confidence,
            audit_share=self.audit_share,
            thresholds=GRID_SIZE,
        )
        make_plain(self)


@dataclass(frozen=True, slots=True)
class Power:
    """Prices every answer in joules: see edge_sdk.answers.price.

    Attributes:
        sensors: whether counters and sensors of the board are used where it has some.
        board: name of a catalogue board whose watts are declared, such as raspberry-pi-4.
        idle_w, busy_w: watts at rest and with all cores busy, declared; they win over `board`.
        radio_j_per_mb: joules for each megabyte sent or received, declared.
    """

    sensors: bool = True
    board: str | None = None
    idle_w: float | None = None
    busy_w: float | None = None
    radio_j_per_mb: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "power", sensors=flag, radio_j_per_mb=number(least=0))
        self.model()
        make_plain(self)

    def model(self) -> PowerModel | None:
        """The declared power model; None without one.

        Raises: ConfigurationError for watts that cannot be, or a board without known watts.
        """
        from profiles.energy import declared_power, reference_power  # noqa: PLC0415 - few need it

        try:
            model = declared_power(self.idle_w, self.busy_w, "the settings")
            if model is not None or self.board is None:
                return model
            model = reference_power(self.board)
        except InvalidProfileError as err:
            raise ConfigurationError(f"power: {err}") from err
        if model is None:
            raise ConfigurationError(
                f"power: no measured watts of {self.board!r:.60} are known; give idle_w and busy_w"
            )
        return model


@dataclass(frozen=True, slots=True)
class Learn:
    """Learns the exit head on the device, from its own labels: see edge_sdk.learning.

    Attributes:
        labels: `corrections` of the user, answers of the `server`, or `both`.
        samples: the newest labelled samples to learn from.
        rate: of SGD, as a share of the largest safe learning rate.
        pull: strength of the pull to the bundle's own head.
    """

    labels: Literal["corrections", "server", "both"] = "both"
    samples: int = 512
    rate: float = 1.0
    pull: float = 0.001

    def __post_init__(self) -> None:
        check_fields(
            self,
            labels=one_of(("corrections", "server", "both")),
            samples=whole(32, 100_000),
            rate=number(above=0, most=2),
            pull=number(least=0),
        )
        make_plain(self)


@dataclass(frozen=True, slots=True)
class Traces:
    """Sends traces to a collector: see edge_sdk.tracing.

    Attributes:
        url: of the collector, for OTLP over HTTP, such as http://collector:4318; `env` takes it
            from the variable OTEL_EXPORTER_OTLP_ENDPOINT.
        share: of the predictions that are traced, or of the queries that bring no trace, in [0, 1].
    """

    url: str
    share: float = TRACES_SHARE

    def __post_init__(self) -> None:
        check_fields(self, "traces", share=number(least=0, most=1))
        expected = f"http://HOST:4318, https://HOST:4318 or {TRACES_OF_ENVIRONMENT}"
        usable = self.url == TRACES_OF_ENVIRONMENT or _names_host(self.url)
        need(usable, "traces: url", expected, self.url)
        make_plain(self)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of one `EdgeAgent`.

    Attributes:
        deadline_s: how long `predict` may take when it offloads; it answers by then plus 0.25 s.
        gate: measure of uncertainty, or a composition (edge_sdk.gate_form), with a threshold, a
            `Budget`, or scales that are its thresholds; None takes the bundle's.
        threshold: of the gate, in its unit; None takes the bundle's.
        controller: adapts the threshold while the agent runs, from the device's own data.
        codec: of the smashed data; None takes the bundle's.
        raw_inputs: send the raw input, compressed without loss, in place of the smashed data where
            that takes fewer bytes and the bundle says that the answer is the same. The server then
            sees the input itself.
        offload: False answers every input on the device.
        late_answers: keep queries that got no reply in the outbox until the server answers them.
        threads: of one onnxruntime run.
        provider: execution provider of onnxruntime (edge_sdk.providers): `auto` takes the fastest
            that gives the golden answers here, a name takes that one.
        probe_interval_s: time between two probes of a server that is away.
        heartbeat_s: time between two telemetry messages.
        max_in_flight: offloads of `predict_many` under way at once.
        personal: name of a training that this device took part in; its personal weights answer
            (edge_sdk.bundles.personal_weights). None answers with the bundle's weights.
        power: prices every answer in joules; None does not.
        learn: learns the exit head while the agent runs; None leaves it as it is.
        traces: sends traces of predictions to a collector; None makes none.
        report_change: share by which free memory, latency or link must change to be reported; 0
            reports nothing.
        report_after_s: how long such a change must last.
    """

    deadline_s: float = 1.0
    gate: str | None = None
    threshold: float | None = None
    controller: Budget | Agreement | None = None
    codec: Codec | None = None
    raw_inputs: bool = False
    offload: bool = True
    late_answers: bool = False
    threads: int = 1
    provider: str = AUTO
    probe_interval_s: float = 0.5
    heartbeat_s: float = 30.0
    max_in_flight: int = 32
    personal: str | None = None
    power: Power | None = None
    learn: Learn | None = None
    traces: Traces | None = None
    report_change: float = 0.25
    report_after_s: float = 60.0

    def __post_init__(self) -> None:
        check_fields(
            self,
            report_change=number(least=0, most=100),
            report_after_s=number(least=1, most=86_400),
            deadline_s=SECONDS,
            threshold=optional(number()),
            codec=optional(one_of(CODECS)),
            raw_inputs=flag,
            threads=whole(1, 256),
            provider=one_of(PROVIDERS),
            probe_interval_s=SECONDS,
            heartbeat_s=SECONDS,
            max_in_flight=whole(1, 200),
        )
        self._check_gate()
        if self.threshold is not None and self.controller is not None:
            raise ConfigurationError("threshold and controller: expected one of them, got both")
        if self.learn is not None and self.learn.labels == "server" and not self.offload:
            raise ConfigurationError("learn from the server needs offload: it would never answer")
        for name in ("late_answers", "controller"):
            if getattr(self, name) and not self.offload:
                raise ConfigurationError(f"{name} needs offload: no query would ever be sent")
        make_plain(self)

    def _check_gate(self) -> None:
        """Refuse a gate that would have no threshold.

        A bundle's threshold and curve are in the unit of the bundle's gate, and the next bundle may
        have another one.
        """
        if self.gate is None:
            return
        form = read_gate(self.gate)
        if isinstance(self.controller, Agreement):
            raise ConfigurationError(
                "gate and agreement: expected one of them, got both; agreement chooses among the"
                " thresholds on the bundle's operating curve, which is of the bundle's gate"
            )
        if self.threshold is None and self.controller is None and form.threshold is None:
            example = "" if not form.terms else ", or with scales, as all(entropy:0.3, margin:0.2)"
            raise ConfigurationError(
                f"gate {self.gate}: expected it with a threshold{example}; the bundle's is for the"
                " bundle's gate"
            )


def _names_host(url: object) -> bool:
    """Whether it is a URL of HTTP."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
    except ValueError:  # of an address of IPv6 that is none
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def check_budget(
    *, limit: float, cost: float = 1.0, per: str = "prediction", floor: float = -math.inf
) -> None:
    """Check the numbers of a `BudgetController` that a user sets.

    Raises: ConfigurationError naming the first that is outside its range.
    """
    check_value("limit", limit, number(least=0))
    check_value("cost", cost, number(above=0))
    check_value("per", per, one_of(("prediction", "second")))
    check_value("floor", floor, number(infinite=True))


def check_agreement(
    *,
    delta: float,
    confidence: float,
    audit_share: float,
    thresholds: int,
    window: int = AUDIT_WINDOW,
) -> None:
    """Check the numbers of an `AgreementController` that a user sets, for a grid of `thresholds`.

    Raises: ConfigurationError naming the first that is outside its range, or a window in which no
        threshold could ever hold.
    """
    check_value("delta", delta, number(above=0, below=1))
    check_value("confidence", confidence, number(above=0, below=1))
    check_value("audit_share", audit_share, number(above=0, most=1))
    least = math.ceil(math.log((1 - confidence) / thresholds) / math.log1p(-delta))
    need(window >= least, "window", f"at least {least} for this delta and grid", window)
