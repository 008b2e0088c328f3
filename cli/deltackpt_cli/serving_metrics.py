"""`--metrics-port` of the commands that run until they are told to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt_cli.console import Output

if TYPE_CHECKING:
    from deltackpt.util.metrics import Metrics

MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        metavar="PORT",
        min=0,
        max=65535,
        show_default=False,
        help="Prometheus metrics, on loopback; 0 takes a free port, and says which.",
    ),
]


@contextmanager
def served(output: Output, role: str, port: int | None) -> Iterator[Metrics]:
    """The metrics of a command, called ``role``, served while the block runs if a port was given."""
    from deltackpt.util.metrics import Metrics

    metrics = Metrics(role)
    with metrics.on(port) as at:
        if at is not None:
            output.note(f"metrics: http://127.0.0.1:{at}/metrics")
        yield metrics
