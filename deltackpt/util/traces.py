"""Traces by OpenTelemetry of a process that has set it up, as `opentelemetry-instrument` does; nothing elsewhere.

A step's trace begins in the trainer's `step()` and goes on wherever the step is taken in: its W3C trace context travels
in the metadata of the step's manifest. https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from deltackpt.errors import DeltackptError

TRACEPARENT: Final = "traceparent"  # in the metadata of a manifest

_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@contextmanager
def span(name: str, metadata: Mapping[str, Any] | None = None, **attributes: str | int) -> Iterator[str | None]:
    """A span of what the block does, which goes on the trace that a step's ``metadata`` names, if it does.

    Yields its trace context, for the metadata of another step; None where nothing is traced. Of an error that leaves
    the block only the code is recorded: a message may name what only its reader should see.
    """
    if "opentelemetry" not in sys.modules:  # a process that traces has imported it
        yield None
        return
    from opentelemetry import trace
    from opentelemetry.trace import Status, StatusCode

    named = {f"deltackpt.{key}": value for key, value in attributes.items()}
    with trace.get_tracer("deltackpt").start_as_current_span(
        name, _context(metadata), attributes=named, record_exception=False, set_status_on_exception=False
    ) as current:
        try:
            yield _carried(current.get_span_context()) if current.is_recording() else None
        except BaseException as error:
            code = error.code if isinstance(error, DeltackptError) else type(error).__name__
            current.set_status(Status(StatusCode.ERROR, code))
            raise


def with_trace(metadata: Mapping[str, Any] | None, traced: str | None) -> Mapping[str, Any] | None:
    """The metadata of a step with the trace context that `span` gave; as they are where there is none, or theirs."""
    return metadata if traced is None else {TRACEPARENT: traced, **(metadata or {})}


def _context(metadata: Mapping[str, Any] | None) -> Any:
    """What a span goes on: the trace of a step; None, the current span of this thread, where the step names none."""
    value = (metadata or {}).get(TRACEPARENT)
    if not isinstance(value, str) or not _FORM.fullmatch(value):
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: value})


def _carried(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
