"""`deltackpt verify`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt.errors import UsageError, sentence
from deltackpt_cli import format as text
from deltackpt_cli.console import Output
from deltackpt_cli.options import Threads
from deltackpt_cli.signing_options import MaxAge, Trust, opened

if TYPE_CHECKING:
    from deltackpt.verification import Finding, VerifyReport

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        show_default=False,
        help="A repository, one part file, or, with --against, a checkpoint directory.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="REPO", show_default=False, help="Compare the directory TARGET with a step of this repository."
    ),
]
Step = Annotated[
    str | None,
    typer.Option(
        metavar="N|latest|TAG",
        show_default=False,
        help="The step for --against: a number, a tag, or `latest` if not given.",
    ),
]
Branch = Annotated[
    str | None,
    typer.Option("--ref", metavar="NAME", show_default=False, help="The branch of the step for --against; main."),
]


def verify(
    output: Output,
    target: Target,
    against: Against = None,
    step: Step = None,
    ref: Branch = None,
    threads: Threads = None,
    trust: Trust = None,
    max_age: MaxAge = None,
) -> None:
    """Check a repository, a part or a checkpoint.

    Of a repository every manifest, file, digest and chain. All findings are collected; the exit code is 0 if
    there are none. With --trust also the signature of every branch, tag, step and fold.
    """
    from deltackpt import verification as library

    if step is not None and against is None:
        raise UsageError(
            "usage", where="--step", have="no --against", need="--against REPO, the repository of the step"
        )
    with output.progress() as progress:
        if against is not None:
            repo = opened(against, trust, max_age)
            report = library.verify_checkpoint(
                target, repo, step or "latest", ref=ref or "main", threads=threads, progress=progress
            )
        elif Path(target).is_file():
            report = library.verify_part(target)
        elif any(Path(target).glob("*.safetensors")):
            raise UsageError(
                "usage", where=target, have="a checkpoint directory", need="--against REPO to compare with"
            )
        else:
            repo = opened(target, trust, max_age)
            if ref is not None:
                repo.branch(ref)  # all of them are checked: a name that none has is a mistake
            report = library.verify_repository(repo, threads=threads, progress=progress)
    output.result(report, lambda: _lines(report))
    if not report.ok:
        raise typer.Exit(report.exit_code)


def findings(found: Iterable[Finding]) -> Iterator[str]:
    """A line each, and one for all steps that are lost for the same reason; a hint that many share comes once."""
    hint = ""
    for finding in _together(found):
        yield f"{sentence(finding.where, finding.have, finding.need)} [{finding.code}]"
        if finding.hint and finding.hint != hint:
            yield f"  hint: {finding.hint}"
        hint = finding.hint


def _together(found: Iterable[Finding]) -> Iterator[Finding]:
    for about, same in groupby(
        found, lambda finding: replace(finding, where="") if _step(finding) is not None else finding
    ):
        if _step(first := next(same)) is not None:
            yield replace(about, where=text.steps([_step(first) or 0, *(_step(other) or 0 for other in same)]))
        else:
            yield first


def _step(finding: Finding) -> int | None:
    number = finding.where.removeprefix("step ")
    return int(number) if number != finding.where and number.isdecimal() else None


def _lines(report: VerifyReport) -> Iterator[str]:
    yield from findings(report.findings)
    found = f"{text.count(len(report.findings))} finding{'s' * (len(report.findings) != 1)}"
    checked = ", ".join(f"{what} {text.count(count)}" for what, count in report.checked.items())
    yield f"{report.target}: {'ok' if report.ok else found} ({checked})"
