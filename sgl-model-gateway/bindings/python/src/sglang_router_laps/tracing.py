"""OpenTelemetry traces of requests, for the stock router's --enable-trace."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from laps_core.config import ConfigError

if TYPE_CHECKING:
    from .request.trail import Trail

NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter")


def check() -> None:
    """Raise ConfigError if a package for tracing is missing."""
    try:
        missing = [name for name in NEEDED if find_spec(name) is None]
    except ModuleNotFoundError as e:
        missing = [str(e.name)]
    if missing:
        raise ConfigError(f"--enable-trace: needs {missing[0]}: pip install 'sglang-laps[trace]'")


class Tracer:
    """Recorder of a span per request, with child spans for the queue, the prefill and the first token.

    Child spans are made from recorded times when the request has ended, so that a running request costs one span.
    """

    def __init__(self, exporter: Any) -> None:
        """Send spans to ``exporter``, a span exporter of OpenTelemetry."""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "sglang-laps-router"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("sglang_router_laps")

    @classmethod
    def to(cls, endpoint: str) -> Tracer:
        """Return a tracer that exports to ``endpoint``: host and port of a collector that takes OTLP over gRPC."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint, insecure=True))

    def start(self, trail: Trail, headers: MutableMapping[str, str]) -> None:
        """Start the request's span under the traceparent in ``headers``. Replace that header by the new span, for the
        servers."""
        parent = self._propagator.extract(headers)
        kind = self._trace.SpanKind.SERVER
        trail.span = self._tracer.start_span(f"POST /{trail.endpoint}", parent, kind, start_time=_wall_ns(trail.began))
        self._propagator.inject(headers, self._trace.set_span_in_context(trail.span))

    def end(self, trail: Trail) -> None:
        """Set the span's attributes, record its child spans and end it."""
        span = trail.span
        if span is None:
            return
        servers = {f"laps.{s.role}": s.url for s in (trail.prefill, trail.decode) if s is not None}
        said = {"laps.id": trail.id, "laps.class": trail.length_class, "laps.new_tokens": trail.tokens}
        span.set_attributes({**said, **servers, "laps.retries": max(0, trail.retries)})
        span.set_attribute("http.response.status_code", trail.status)
        if trail.status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        within = self._trace.set_span_in_context(span)
        parts = (("queue", trail.placed or (None, None)), ("prefill", (trail.sent, trail.prefilled)))
        for name, (start, end) in (*parts, ("first token", (trail.sent, trail.first))):
            if start is not None and end is not None:
                part = self._tracer.start_span(name, within, start_time=_wall_ns(start))
                part.end(_wall_ns(max(start, end)))
        span.end()

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()


def _wall_ns(at: float) -> int:
    """Convert a monotonic time (seconds) to nanoseconds since 1970."""
    return time.time_ns() - round(1e9 * (time.monotonic() - at))
