"""Spans to a collector, by OTLP over HTTP. The only importer of opentelemetry.

Of opentelemetry only the form of a span and the exporter are used: no global provider and no
context of a thread, so a program that traces itself with opentelemetry is not disturbed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from edge_sdk.errors import ConfigurationError
from edge_sdk.installation import installed_version
from edge_sdk.settings import TRACES_OF_ENVIRONMENT, Traces
from edge_sdk.tracing.spans import TEXT_MAX, Span
from edge_sdk.wire.traceparent import TraceContext

ENVIRONMENT: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PATH: Final = "/v1/traces"

_KINDS: Final = {
    "internal": SpanKind.INTERNAL,
    "client": SpanKind.CLIENT,
    "server": SpanKind.SERVER,
}


class OtlpExporter:
    """Sends spans to one collector.

    Headers, certificates, compression and timeout come from the variables OTEL_EXPORTER_OTLP_*, and
    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before `about`.

    Args:
        about: attributes of the program that sends.
    Raises: ConfigurationError if the environment shall name the collector and does not, or names
        something that cannot be used.
    """

    def __init__(self, settings: Traces, about: Mapping[str, str]) -> None:
        self._endpoint = _endpoint(settings)
        ours = Resource({**about, "service.version": installed_version()})
        self._resource = ours.merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("splitedge", installed_version())
        try:
            self._exporter = OTLPSpanExporter(self._endpoint)
        except (ValueError, OSError) as err:
            raise ConfigurationError(
                f"traces: the variables OTEL_EXPORTER_OTLP_* cannot be used ({err})"
            ) from err

    def send(self, spans: Sequence[Span]) -> str:
        """Send spans; it may take seconds.

        Returns: why they did not arrive; empty if they did.
        """
        said = _Said()
        logger = logging.getLogger(trace_exporter.__name__)
        logger.addFilter(said)
        try:
            done = self._exporter.export([self._readable(span) for span in spans])
        finally:
            logger.removeFilter(said)
        if done is SpanExportResult.SUCCESS:
            return ""
        return f"{self._endpoint}: {said.first or 'the collector did not take them'}"

    def stop(self) -> None:
        """Give up what is being sent, and send nothing any more."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # it has no types

    def _readable(self, span: Span) -> ReadableSpan:
        status = Status(StatusCode.ERROR, span.error[:TEXT_MAX]) if span.error else Status()
        return ReadableSpan(
            span.name,
            context=_context(span.context),
            parent=None
            if span.parent is None
            else _context(span.parent, remote=span.kind == "server"),
            resource=self._resource,
            attributes=span.attributes,
            links=[Link(_context(link)) for link in span.links],
            kind=_KINDS[span.kind],
            instrumentation_scope=self._scope,
            status=status,
            start_time=span.begin_ns,
            end_time=span.end_ns,
        )


class _Said(logging.Filter):
    """Takes the exporter's complaints in this thread: it makes one at every attempt."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.first = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True  # of a program that traces itself
        self.first = self.first or record.getMessage()[:TEXT_MAX]
        return False


def _endpoint(settings: Traces) -> str:
    """The URL that spans are posted to.

    Raises: ConfigurationError.
    """
    if settings.url != TRACES_OF_ENVIRONMENT:
        base = settings.url
    else:
        whole, base = (os.environ.get(name, "") for name in ENVIRONMENT)
        if whole:
            return whole
        if not base:
            raise ConfigurationError(
                f"traces: the environment names no collector; set {ENVIRONMENT[1]}, or give the"
                " URL of the collector"
            )
    return base if base.endswith(PATH) else f"{base.rstrip('/')}{PATH}"


def _context(context: TraceContext, *, remote: bool = False) -> SpanContext:
    return SpanContext(
        context.trace_id,
        context.span_id,
        is_remote=remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
