"""Traces of requests with OpenTelemetry, as --enable-trace of the stock router asks for them."""

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
    """Raise ConfigError where traces could not be sent."""
    try:
        missing = [name for name in NEEDED if find_spec(name) is None]
    except ModuleNotFoundError as e:
        missing = [str(e.name)]
    if missing:
        raise ConfigError(f"--enable-trace: needs {missing[0]}: pip install 'sglang-laps[trace]'")


class Tracer:
    """A span for each request, with spans in it for the queue, the prefill and the first token.

    They are made when the request has ended, from its times: while it runs it costs its own span alone.
    """

    def __init__(self, exporter: Any) -> None:
        """``exporter``: OpenTelemetry's, of spans."""
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
        """``endpoint``: host and port of a collector that takes OTLP over gRPC."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint, insecure=True))

    def start(self, trail: Trail, headers: MutableMapping[str, str]) -> None:
        """``headers``: the client's, whose traceparent is taken in; the servers find the request's own in its place."""
        parent = self._propagator.extract(headers)
        kind = self._trace.SpanKind.SERVER
        trail.span = self._tracer.start_span(f"POST /{trail.endpoint}", parent, kind, start_time=_wall_ns(trail.began))
        self._propagator.inject(headers, self._trace.set_span_in_context(trail.span))

    def end(self, trail: Trail) -> None:
        """The request has been answered, or has come to another end."""
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
        """Send what has not been sent yet."""
        self._provider.shutdown()


def _wall_ns(at: float) -> int:
    """A monotonic time (seconds) as nanoseconds since 1970."""
    return time.time_ns() - round(1e9 * (time.monotonic() - at))
