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
    str | None,
    typer.Option(
        "--metrics-port",
        metavar="[HOST:]PORT",
        show_default=False,
        help="Prometheus metrics, on loopback if no host is named; 0 takes a free port, and says which.",
    ),
]


@contextmanager
def served(output: Output, role: str, port: str | None) -> Iterator[Metrics]:
    """The metrics of a command, called ``role``, served while the block runs if a port was given."""
    from deltackpt.util.metrics import Metrics, address

    metrics = Metrics(role)
    with metrics.on(port) as at:
        if port is not None:
            host = address(port)[0]
            output.note(f"metrics: http://{f'[{host}]' if ':' in host else host}:{at}/metrics")
        yield metrics
