"""Signed announcements: an engine that asks the repository for signatures asks a session for them too.

The trainer's first rank signs what it announces with the key that signs its steps: which state follows which, the
parts by their sha256, the sums, and when. The words begin with a format of their own, so that they are no statement
about a record of the repository (spec/SIGNATURES.md), and the other way round.
"""

from __future__ import annotations

import time
from dataclasses import replace

from deltackpt.errors import ChainError, StoreError
from deltackpt.format.canonical import dumps
from deltackpt.live.messages import Announcement, sums_to
from deltackpt.repository import Repository
from deltackpt.repository.signer import RecordSigner


def message_of(step: Announcement, ref: str) -> bytes:
    """What is signed of an announcement on branch ``ref``: canonical JSON. Where a part is read has no part in it."""
    return dumps(
        {
            "format": "deltackpt-live",
            "version": 1,
            "repository": step.repository,
            "ref": ref,
            "step": step.step,
            "parent": step.parent,
            "base": step.base,
            "state": step.state,
            "parts": [[p.file.name, p.file.size, p.file.sha256] for p in step.parts],
            "sums": sums_to(step.sums),
            "time": step.time,
        }
    )


def signed(step: Announcement, ref: str, signer: RecordSigner | None, after: int = 0) -> Announcement:
    """The same, signed, at a time later than ``after`` (microseconds since 1970); as it is where nobody signs.

    Raises UsageError ``sign-key``.
    """
    if signer is None:
        return step
    timed = replace(step, time=max(time.time_ns() // 1000, after + 1))
    return replace(timed, signature=signer.sign_message(message_of(timed, ref)))


class AnnouncementCheck:
    """What one rank asks of announcements on branch ``ref``, whose ``repo`` asks for signatures.

    Looks at the branch first: what was signed before it was last moved is refused. Raises what reading a signed branch
    raises.
    """

    def __init__(self, repo: Repository, ref: str) -> None:
        assert repo.trust is not None, "a repository that asks for signatures"
        self._trust, self._ref, self._id = repo.trust, ref, repo.id
        repo.ref(ref)
        self._last = self._trust.time_of(f"refs/{ref}")

    def why_not(self, step: Announcement) -> str:
        """Why a step is not taken from the session; "" where it is, and nothing signed before it will be any more."""
        if step.repository != self._id:
            return "a step of another repository"
        if step.signature is None:
            return "nobody signed it"
        if step.time <= self._last:
            return "it was signed before what this rank has"
        try:
            self._trust.check_message(message_of(step, self._ref), [step.signature], f"step {step.step}, live")
        except (ChainError, StoreError) as error:
            return error.sentence()
        self._last = step.time
        return ""
