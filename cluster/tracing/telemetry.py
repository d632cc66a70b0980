"""TelemetrySink: exports OpenTelemetry spans to a collector, or to a file with one line per span."""

from __future__ import annotations

from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Span as OpenSpan
from opentelemetry.trace import set_span_in_context

from mobula.cluster.tracing.tracer import Span, SpanSink

STEP = "step "
CLOSE_MS = 10_000  # for the export of the remaining spans


class TelemetrySink(SpanSink):
    """Exports one trace per prompt and per step. Each stage or phase is a child of the root span, which ends last."""

    name = "opentelemetry"

    def __init__(self, exporter: SpanExporter, run: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "mobula", "mobula.run": run}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("mobula")
        self._roots: dict[str, OpenSpan] = {}

    def record(self, span: Span) -> None:
        context = set_span_in_context(self._root(span))
        child = self._tracer.start_span(span.name, context, attributes=_attributes(span), start_time=span.start_ns)
        child.end(span.end_ns)

    def finish(self, whole: Span) -> None:
        root = self._root(whole)
        root.set_attributes(_attributes(whole))
        root.end(whole.end_ns)
        del self._roots[whole.trace]

    def end_step(self, step: int, whole: Span) -> None:
        self.finish(whole)

    def close(self) -> None:
        self._roots.clear()
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()

    def _root(self, span: Span) -> OpenSpan:
        if span.trace not in self._roots:
            name = "step" if span.trace.startswith(STEP) else "prompt"
            self._roots[span.trace] = self._tracer.start_span(name, start_time=span.start_ns)
        return self._roots[span.trace]


class FileExporter(ConsoleSpanExporter):
    """Appends one line of JSON per span."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        super().__init__(out=self._file, formatter=lambda span: span.to_json(indent=None) + "\n")

    def shutdown(self) -> None:
        self._file.close()


def otlp_exporter(address: str) -> SpanExporter:
    """Returns an exporter to a collector over HTTP. OTEL_EXPORTER_OTLP_HEADERS has the headers, such as keys."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=address)


def _attributes(span: Span) -> dict[str, str | int | float]:
    return {"mobula.trace": span.trace, **{f"mobula.{name}": value for name, value in span.attributes.items()}}
