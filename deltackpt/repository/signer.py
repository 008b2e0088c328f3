"""A writer's signatures: of each step before its branch moves, of tags, and of edges (spec/SIGNATURES.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import cached_property

from deltackpt.errors import ConflictError
from deltackpt.format.manifest import Link
from deltackpt.format.signature import MAX_TIME, Signature, SignedStatement, Statement
from deltackpt.repository.objects import Objects
from deltackpt.repository.signatures import put_signature, read_signatures
from deltackpt.signing import ed25519
from deltackpt.signing.keys import Signer
from deltackpt.signing.memory import Seen, TrustMemory


class RecordSigner:
    """Signs records of repository ``identity`` with one key, and remembers what it signed last.

    ``others``: more keys whose statements it goes on from.
    """

    def __init__(
        self,
        objects: Objects,
        identity: str,
        sign: Signer,
        memory: TrustMemory | None = None,
        others: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._objects, self._identity, self._sign, self._others = objects, identity, sign, others
        self._memory = memory or TrustMemory(identity)
        self._last: dict[str, Seen] = {}  # what this process signed, and moved a branch to
        self._times: dict[str, int] = {}  # of the last statement it made, whether or not the branch moved

    def head(self, ref: str, new: Link, old: Link | None) -> SignedStatement:
        """The statement that branch ``ref`` moves from ``old`` to ``new``, to be put before it does. It is remembered
        once the branch has `moved`: a writer that is killed in between left the branch where it was.

        Raises ConflictError ``sign-behind`` where the branch is not where this signer left it, nor moved on by a
        later statement of this key or the others; UsageError ``sign-key``, and what the store raises.
        """
        name = f"refs/{ref}"
        last = self._last.get(name) or self._memory.seen(name, signed=True)
        least = last.time if last is not None else 0
        if old is not None and (last is None or last.link != old):
            newest = max((one.statement.time for one in self._own(old, name)), default=0)
            if last is not None and newest <= last.time:  # [S-SIG-8]
                raise self._behind(name, old, last.link)
            least = max(least, newest)
        if old is None and last is not None:
            raise self._behind(name, None, last.link)
        return self._sign_statement(Statement(self._identity, name, new, old, self._after(name, least)))

    def moved(self, one: SignedStatement) -> None:
        """Remember that a branch moved as the statement says."""
        assert one.statement.ref is not None
        seen = Seen(one.statement.link, one.statement.time)
        self._last[one.statement.ref] = seen
        self._memory.learn(one.statement.ref, seen, signed=True)

    def sign_message(self, message: bytes) -> Signature:
        """Sign words that are about no record, and begin so that they can be taken for none. Raises UsageError
        ``sign-key``."""
        return self._sign(message)

    def again(self, name: str | None, link: Link, previous: Link | None) -> SignedStatement:
        """Sign a record that is there, as what the branch or tag ``name`` is at, or under no name.

        Of a branch, what is said of the step before is what this key said already, or ``previous``.
        """
        least = 0
        if name is not None:
            last = self._memory.seen(name, signed=True)
            said = list(self._own(link, name))
            moved = last is not None and last.link != link and all(one.statement.time <= last.time for one in said)
            if last is not None and moved and name.startswith("refs/") and last.link.step >= link.step:
                raise self._behind(name, link, last.link)
            least = max([last.time if last else 0, *(one.statement.time for one in said)])
            previous = said[0].statement.previous if said else previous
        one = self._sign_statement(Statement(self._identity, name, link, previous, self._after(name, least)))
        put_signature(self._objects.store, one)
        if name is not None:
            self.moved(one)
        return one

    @cached_property
    def public(self) -> str:
        """The public key, 64 hex digits; of a command, by signing nothing. Raises UsageError ``sign-key``."""
        return getattr(self._sign, "public", None) or self._sign(b"").key

    def _sign_statement(self, statement: Statement) -> SignedStatement:
        return SignedStatement(statement, self._sign(statement.encode()))

    def _own(self, link: Link, name: str) -> list[SignedStatement]:
        """What this key and the others said about a name at a step, newest first."""
        keys = {self.public, *self._others()}
        found = read_signatures(self._objects.store, link, keys)
        return [
            one
            for one in found
            if one.by.key in keys
            and (one.statement.ref, one.statement.repository) == (name, self._identity)
            and ed25519.verify(one.by, one.statement.encode())
        ]

    def _behind(self, name: str, old: Link | None, last: Link) -> ConflictError:
        return ConflictError(
            "sign-behind",
            where=f"{self._objects.store.url}, {name}",
            have=f"step {old.step}, {old.id[:12]}" if old else "no such branch",
            need=f"step {last.step}, {last.id[:12]}, which was signed here last, or a later one of this key",
            hint="The branch was taken back, or another key moved it on. If that is meant, "
            "`deltackpt sign REPO --ref NAME --forget` signs where it is now, and forgets where it was.",
        )

    def forget(self, name: str) -> None:
        """Begin anew with a name: where it is now is taken for right."""
        self._last.pop(name, None)
        self._memory.forget(name)

    def _after(self, name: str | None, least: int) -> int:
        """The time of a statement about a name: now, and later than ``least`` and than the last one made here, in
        microseconds."""
        found = min(max(time.time_ns() // 1000, max(least, self._times.get(name or "", 0)) + 1), MAX_TIME)
        if name is not None:
            self._times[name] = found
        return found
