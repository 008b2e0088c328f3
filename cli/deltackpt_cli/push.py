"""`deltackpt push`."""

from __future__ import annotations

from typing import Annotated

import typer

from deltackpt_cli.console import Output
from deltackpt_cli.mirror import Jobs, Limit, mirror
from deltackpt_cli.options import Repo
from deltackpt_cli.signing_options import MaxAge, Trust

Remote = Annotated[
    str, typer.Argument(metavar="REMOTE", show_default=False, help="Its copy elsewhere: a directory or URL.")
]


def push(
    output: Output,
    repo: Repo,
    remote: Remote,
    limit: Limit = None,
    jobs: Jobs = 8,
    trust: Trust = None,
    max_age: MaxAge = None,
) -> None:
    """Copy what REMOTE lacks of REPO to it.

    `mirror REPO REMOTE`, which has more options.
    """
    mirror(output, repo, remote, limit=limit, jobs=jobs, trust=trust, max_age=max_age)
