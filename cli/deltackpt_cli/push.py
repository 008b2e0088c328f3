"""`deltackpt push`."""

from __future__ import annotations

from typing import Annotated

import typer

from deltackpt_cli.console import Output
from deltackpt_cli.mirror import Jobs, Limit, mirror
from deltackpt_cli.options import Repo

Remote = Annotated[
    str, typer.Argument(metavar="REMOTE", show_default=False, help="Its copy elsewhere: a directory or URL.")
]


def push(output: Output, repo: Repo, remote: Remote, limit: Limit = None, jobs: Jobs = 8) -> None:
    """Copy what REMOTE lacks of REPO to it.

    `mirror REPO REMOTE`, which has more options.
    """
    mirror(output, repo, remote, limit=limit, jobs=jobs)
