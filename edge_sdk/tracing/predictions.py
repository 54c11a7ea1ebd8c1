"""Traces of an agent's predictions: the span `predict`, and its child `offload`.

They say what was decided and how long it took, never an input, a label or a probability.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from edge_sdk.answers.prediction import SERVER, Prediction
from edge_sdk.errors import ConfigurationError
from edge_sdk.installation import install_command
from edge_sdk.manifest import BundleManifest
from edge_sdk.offload.pending import Pending
from edge_sdk.settings import Traces
from edge_sdk.tracing.caller import caller
from edge_sdk.tracing.span_queue import SpanQueue
from edge_sdk.tracing.spans import TEXT_MAX, Attribute, Kind, Sampler, Span, WallClock
from edge_sdk.wire.traceparent import TraceContext

SERVICE: Final = "splitedge-agent"


class OffloadTrace:
    """The places of one prediction that is being offloaded.

    Attributes:
        caller, predict, offload: of the spans; the caller's is None where it has none.
        begun_s: of the offload, by time.perf_counter.
    """

    __slots__ = ("begun_s", "caller", "offload", "predict")

    def __init__(
        self, caller: TraceContext | None, predict: TraceContext, offload: TraceContext
    ) -> None:
        self.caller = caller
        self.predict = predict
        self.offload = offload
        self.begun_s = time.perf_counter()


class PredictionTraces:
    """Traces a share of the predictions; several threads may call it."""

    def __init__(self, share: float, spans: SpanQueue) -> None:
        self._sampler = Sampler(share)
        self._spans = spans

    def exited(self, manifest: BundleManifest, answer: Prediction, begun_s: float) -> None:
        """Trace an answer of the device, if it is chosen.

        Args:
            begun_s: of the prediction, by time.perf_counter.
        """
        place = self._place()
        if place is None:
            return
        now_s = time.perf_counter()
        clock = WallClock(now_s)
        times = clock.ns(begun_s), clock.ns(now_s)
        self._spans.add(_predict(*place, manifest, answer, times))

    def begin(self) -> OffloadTrace | None:
        """The places of a prediction that is offloaded now; None if it is not chosen."""
        place = self._place()
        if place is None:
            return None
        predict, parent = place
        return OffloadTrace(parent, predict, self._sampler.child(predict))

    def ended(
        self,
        trace: OffloadTrace,
        manifest: BundleManifest,
        answer: Prediction,
        pending: Pending,
        begun_s: float,
    ) -> None:
        """Trace an answer to an input that was offloaded.

        Args:
            begun_s: of the prediction, by time.perf_counter.
        """
        now_s = time.perf_counter()
        clock = WallClock(now_s)
        end_ns = clock.ns(now_s)
        attributes: dict[str, Attribute] = {
            "splitedge.bytes_up": pending.bytes_up,
            "splitedge.bytes_down": pending.bytes_down,
        }
        offload = Span(
            "offload",
            "client",
            trace.offload,
            trace.predict,
            clock.ns(trace.begun_s),
            end_ns,
            attributes,
            error="" if answer.source == SERVER else answer.reason or "no answer",
        )
        times = clock.ns(begun_s), end_ns
        predict = _predict(trace.predict, trace.caller, manifest, answer, times)
        self._spans.add(offload, predict)

    def report(self) -> Mapping[str, int]:
        """Spans that were sent and dropped, for the agent's status."""
        return self._spans.report()

    def close(self) -> None:
        """Send what waits, for a short time, and end."""
        self._spans.close()

    def _place(self) -> tuple[TraceContext, TraceContext | None] | None:
        """The place of a prediction's span, and its parent; None if it is not traced.

        Whoever asks with a trace has chosen; else the share decides.
        """
        parent = caller()
        if parent is None:
            return (self._sampler.root(), None) if self._sampler.chooses() else None
        return (self._sampler.child(parent), parent) if parent.sampled else None


def _predict(
    context: TraceContext,
    parent: TraceContext | None,
    manifest: BundleManifest,
    answer: Prediction,
    times_ns: tuple[int, int],
) -> Span:
    attributes: dict[str, Attribute] = {
        "splitedge.model": manifest.model,
        "splitedge.version": manifest.version,
        "splitedge.depth": manifest.depth,
        "splitedge.uncertainty": float(answer.uncertainty),
        "splitedge.threshold": float(answer.threshold),
        "splitedge.source": answer.source,
    }
    if answer.reason:
        attributes["splitedge.reason"] = answer.reason[:TEXT_MAX]
    kind: Kind = "internal" if parent is None else "server"
    return Span("predict", kind, context, parent, *times_ns, attributes)


def open_queue(settings: Traces, about: Mapping[str, str]) -> SpanQueue:
    """A queue of spans for the collector of the settings.

    Args:
        about: attributes of the program that sends, such as service.name.
    Raises: ConfigurationError if opentelemetry is not installed, or the collector is not named.
    """
    try:
        from edge_sdk.tracing.otlp import OtlpExporter  # noqa: PLC0415 - 12 MB, only when asked for
    except ModuleNotFoundError as err:
        raise ConfigurationError(
            f"traces need opentelemetry; run `{install_command('traces')}`"
        ) from err
    return SpanQueue(OtlpExporter(settings, about))


def open_predictions(settings: Traces, device: str) -> PredictionTraces:
    """The traces of a device's predictions.

    Args:
        device: its name; "" for a bundle that runs without a server.
    Raises: ConfigurationError as `open_queue`.
    """
    about = {"service.name": SERVICE}
    if device:
        about["service.instance.id"] = device
    return PredictionTraces(settings.share, open_queue(settings, about))
