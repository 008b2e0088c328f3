"""`deltackpt pull`."""

from __future__ import annotations

from deltackpt_cli.console import Output
from deltackpt_cli.mirror import Jobs, Limit, mirror
from deltackpt_cli.options import Repo
from deltackpt_cli.push import Remote
from deltackpt_cli.signing_options import MaxAge, Trust


def pull(
    output: Output,
    repo: Repo,
    remote: Remote,
    limit: Limit = None,
    jobs: Jobs = 8,
    trust: Trust = None,
    max_age: MaxAge = None,
) -> None:
    """Copy what REPO lacks of REMOTE to it.

    REPO is made if there is none. `mirror REMOTE REPO`, which has more options.
    """
    mirror(output, remote, repo, limit=limit, jobs=jobs, trust=trust, max_age=max_age)
