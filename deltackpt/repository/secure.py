"""Whether a repository asks for signatures, and makes them: what was given, or what the environment says."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from deltackpt.format.manifest import Link, Manifest
    from deltackpt.repository.objects import Objects
    from deltackpt.repository.signer import RecordSigner
    from deltackpt.repository.trust import Trust
    from deltackpt.signing.keys import Signer
    from deltackpt.signing.policy import TrustPolicy

VARIABLES = ("DELTACKPT_TRUST", "DELTACKPT_MAX_AGE", "DELTACKPT_SIGN_KEY")


class Security(NamedTuple):
    """What was asked for, before it is opened; None stands for what the environment says."""

    trust: str | os.PathLike[str] | TrustPolicy | None
    max_age: float | None
    sign: str | os.PathLike[str] | Signer | None

    @property
    def wanted(self) -> bool:
        """Whether anything was given, or the environment says anything."""
        return self != (None, None, None) or any(os.environ.get(name) for name in VARIABLES)

    def open(
        self,
        objects: Objects,
        identity: str,
        load: Callable[[Link], Manifest],
        before: tuple[Trust | None, RecordSigner | None],
    ) -> tuple[Trust | None, RecordSigner | None]:
        """What checks the records of a repository, and what signs them: those ``before`` unless something was given.

        Raises what `Repository.secure` raises.
        """
        from deltackpt.repository.signer import RecordSigner
        from deltackpt.repository.trust import Trust
        from deltackpt.signing.keys import signer
        from deltackpt.signing.policy import trust_policy

        trust, signs = before
        if trust is None or (self.trust, self.max_age) != (None, None):
            policy = trust_policy(self.trust, self.max_age)
            trust = Trust(objects, identity, policy, load) if policy is not None else trust
        if (signs is not None and self.sign is None) or (key := signer(self.sign)) is None:
            return trust, signs
        others = (lambda: trust.keys().keys) if trust is not None else tuple
        return trust, RecordSigner(objects, identity, key, others=others)
