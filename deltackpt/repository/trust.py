"""What a reader believes of a store that it does not trust: signatures, checked before a step is used.

Everything below a manifest is named by sha256, and a manifest by its own; so it is names that are checked here: what a
branch or tag is at, a step that was asked for, an edge (spec/SIGNATURES.md, "Reading").
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from threading import Lock

from deltackpt.errors import ChainError, NotFoundError
from deltackpt.format.manifest import Link, Manifest
from deltackpt.format.signature import MAX_KEY_SET, KeySet, Signature, SignedStatement, decode_keys, fingerprint
from deltackpt.repository.objects import Objects
from deltackpt.repository.signatures import read_signatures
from deltackpt.signing import ed25519
from deltackpt.signing.memory import Seen, TrustMemory, check_place
from deltackpt.signing.policy import TrustPolicy
from deltackpt.store import Store
from deltackpt.util.moments import utc

KEYS_FOR = 5.0  # seconds for which a key set is not asked for anew
logger = logging.getLogger("deltackpt")

Load = Callable[[Link], Manifest]


class Trust:
    """Checks records of repository ``identity`` by ``policy``. Threads may share it.

    ``load`` gives a manifest, checked against its id. Raises ChainError ``repository-replaced`` where another
    repository than before is at this place, or than the keys are for.
    """

    def __init__(
        self, objects: Objects, identity: str, policy: TrustPolicy, load: Load, memory: TrustMemory | None = None
    ) -> None:
        self._objects, self._identity, self._policy, self._load = objects, identity, policy, load
        self._memory = memory or TrustMemory(identity)
        self._proven: dict[str, Seen] = {}  # what each name is at
        self._steps: set[tuple[Link, str | None]] = set()  # steps and edges that are signed, and the name asked for
        self._keys: tuple[KeySet, float] | None = None  # and when they were asked for
        self._lock = Lock()
        root = policy.root
        if root is not None and root.repository not in (None, identity):  # [S-SIG-13]
            need = f"repository {root.repository}, which the keys are for"
            raise ChainError("repository-replaced", where=self.store.url, have=f"repository {identity}", need=need)
        check_place(self.store.url, identity)

    @property
    def store(self) -> Store:
        """The store that is not trusted."""
        return self._objects.store

    def check_name(self, name: str, link: Link) -> None:
        """Raise unless the branch ``refs/NAME`` or tag ``tags/NAME`` may be at ``link``.

        ChainError ``signature-missing``, ``signature-replayed``, ``signature-stale``, ``rewind-unsigned``, and what
        `keys` raises.
        """
        with self._lock:
            known = self._proven.get(name)
            if known is not None and known.link == link and self._fresh(name, known.time):
                return
            found = self._vouched(name, link)
            self._check_order(name, link, found)
            if not self._fresh(name, found.time):  # [S-SIG-7]
                raise self._stale(name, link, found.time)
            self._memory.learn(name, found)
            self._proven[name] = found

    def check_again(self, name: str) -> None:
        """A name that has not moved: raise ChainError ``signature-stale`` where no statement says so lately."""
        known = self._proven.get(name)
        if known is not None and not self._fresh(name, known.time):
            self.check_name(name, known.link)

    def check_step(self, link: Link, name: str | None = None) -> None:
        """Raise ChainError ``signature-missing`` unless the record, a manifest or an edge, is signed: under any name,
        or under ``name`` or none. Also what `keys` raises.
        """
        with self._lock:
            if (link, name) not in self._steps:
                keys = self.keys(link)
                found = self._by_key(link, keys, name, nameless=True)
                self._enough(found, keys, link, f"step {link.step}")
                self._steps.add((link, name))

    def check_message(self, message: bytes, by: Collection[Signature], what: str) -> None:
        """Raise ChainError ``signature-missing`` unless enough keys signed words that are about no record; also what
        `keys` raises."""
        with self._lock:
            keys = self.keys()
            found = {one.key for one in by if one.key in keys.keys and ed25519.verify(one, message)}
            if len(found) < keys.threshold:
                have, need = f"{len(found)} signatures of keys that are trusted", f"{keys.threshold}"
                raise ChainError("signature-missing", where=f"{self.store.url}, {what}", have=have, need=need)

    def time_of(self, name: str) -> int:
        """When what is believed of a branch or tag was signed, microseconds since 1970; 0 where nothing is."""
        known = self._proven.get(name)
        return known.time if known is not None else 0

    def vouches(self, link: Link) -> bool:
        """Is the record signed? Of an edge, which is passed over where it is not."""
        try:
            self.check_step(link)
        except ChainError as error:
            if error.code != "signature-missing":
                raise
            return False
        return True

    def keys(self, link: Link | None = None) -> KeySet:
        """The newest key set that follows from the reader's own, or from what was trusted at first use.

        Raises ChainError ``keys-wrong`` for one that the set before it did not sign, ``keys-expired``; and, where
        nothing says whom to trust, ``signature-missing``, or ``first-use-unclear`` for a ``link`` of many signers.
        """
        if self._keys is not None and time.monotonic() - self._keys[1] < KEYS_FOR:
            return self._keys[0]
        root = self._policy.root
        current = self._memory.keys(root) or root or self._first_use(link)
        for keys in self._later(current):  # [S-SIG-10]
            current = keys
        if root is None or current.number > root.number:
            self._memory.learn_keys(root, current)
        if current.expires is not None and time.time() > current.expires:  # [S-SIG-11]
            raise ChainError(
                "keys-expired",
                where=f"{self.store.url}, key set {current.number}",
                have=f"keys that expired at {utc(current.expires)}",
                need="a later set, or other keys to trust",
                hint="`deltackpt keys REPO --set KEYS --sign KEY` publishes one.",
            )
        self._keys = current, time.monotonic()
        return current

    def _later(self, current: KeySet | None) -> Iterator[KeySet]:
        """The sets after ``current`` in the store, each signed by the one before and by itself."""
        while True:
            name = f"keys/{current.number + 1 if current else 1:08d}.json"
            try:
                raw = self.store.get(name, MAX_KEY_SET)
            except NotFoundError:
                return
            yield (current := self._key_set(raw, name, current))

    def _key_set(self, raw: bytes, name: str, current: KeySet | None) -> KeySet:
        """The set in an object, which the set before it has to have signed, where that is known, and its own keys."""
        signed = decode_keys(raw, f"{self.store.url}/{name}")
        new = signed.keys
        message = new.encode()
        good = {by.key for by in signed.by if ed25519.verify(by, message)}
        own = len(good & {*new.keys}) >= new.threshold
        before = current is None or len(good & {*current.keys}) >= current.threshold
        if (new.repository, new.name) != (self._identity, name) or not own or not before:
            raise ChainError(  # [S-SIG-10]
                "keys-wrong",
                where=f"{self.store.url}/{name}",
                have="a key set without enough signatures, or of another place",
                need=f"signatures of {current.threshold if current else new.threshold} keys of the set before it, "
                f"and of {new.threshold} of its own",
                hint="Ask who runs the repository for its keys, and what became of this object.",
            )
        return new

    def check_key_set(self, name: str, before: KeySet | None) -> KeySet:
        """Read a set again, also one that is believed already. ``before``: the one before it, where that is known.
        Raises ChainError ``keys-wrong``, and what decoding raises."""
        root = self._policy.root
        if before is None and root is not None and name == f"keys/{root.number + 1:08d}.json":
            before = root
        return self._key_set(self.store.get(name, MAX_KEY_SET), name, before)

    def _first_use(self, link: Link | None) -> KeySet:
        """The key that signed, where none was trusted so far."""
        for keys in self._later(None):
            self._say_first(keys)
            return keys
        found = {
            one.by.key
            for one in (read_signatures(self.store, link) if link else ())
            if one.statement.repository == self._identity and ed25519.verify(one.by, one.statement.encode())
        }
        where = f"{self.store.url}, {link.name}" if link else self.store.url
        need, hint = "those of one key, to be trusted from now on", "Ask who publishes it, and give --trust KEYS."
        if not found:
            raise ChainError("signature-missing", where=where, have="no signature", need=need, hint=hint)
        if len(found) > 1:
            have = f"signatures of {len(found)} keys"
            raise ChainError("first-use-unclear", where=where, have=have, need=need, hint=hint)
        keys = KeySet(self._identity, 0, (found.pop(),))
        self._say_first(keys)
        return keys

    def _say_first(self, keys: KeySet) -> None:
        logger.warning(
            "%s: trusted on first use, and from now on: %s. Nothing proves whose it is: compare it with what its owner "
            "says", self.store.url, ", ".join(map(fingerprint, keys.keys))
        )  # fmt: skip

    def _vouched(self, name: str, link: Link) -> Seen:
        """What enough keys say of a name; the time is that of the last that is needed."""
        keys = self.keys(link)
        by_key = self._by_key(link, keys, name)
        self._enough(by_key, keys, link, f"{name} at step {link.step}")
        times = sorted((max(one.statement.time for one in found) for found in by_key.values()), reverse=True)
        return Seen(link, times[keys.threshold - 1])

    def _by_key(
        self, link: Link, keys: KeySet, name: str | None, *, nameless: bool = False
    ) -> dict[str, list[SignedStatement]]:
        """The statements of trusted keys about a record, and a name if one is given, by key; each is proven.
        ``nameless``: those that say no name, too."""
        found: dict[str, list[SignedStatement]] = {}
        for one in read_signatures(self.store, link, keys.keys):
            said = one.statement
            if one.by.key not in keys.keys or said.repository != self._identity:
                continue
            if name not in (None, said.ref) and not (nameless and said.ref is None):
                continue
            if ed25519.verify(one.by, said.encode()):  # [S-SIG-3]
                found.setdefault(one.by.key, []).append(one)
        return found

    def _enough(self, found: Collection[str], keys: KeySet, link: Link, what: str) -> None:
        """Raise ChainError ``signature-missing`` below the threshold."""
        if len(found) < keys.threshold:  # [S-SIG-5]
            raise ChainError(
                "signature-missing",
                where=f"{self.store.url}, {what}, {link.id[:12]}",
                have=f"{len(found)} signatures of keys that are trusted",
                need=f"{keys.threshold}, of {len(keys.keys)} keys",
                hint="Nothing of it was used. Who publishes it signs a step with `deltackpt sign REPO STEP`.",
            )

    def _check_order(self, name: str, link: Link, found: Seen) -> None:
        """[S-SIG-6]: nothing that is older than what was seen."""
        seen = self._memory.seen(name)
        if seen is None or seen.link == link:
            return
        if found.time <= seen.time:
            raise ChainError(
                "signature-replayed",
                where=f"{self.store.url}, {name}",
                have=f"step {link.step}, signed at {utc(found.time / 1e6)}",
                need=f"a statement after {utc(seen.time / 1e6)}, when step {seen.link.step} was",
                hint="An older state of the branch was put back, or this copy is behind another that was read before. "
                "`--step NUMBER-ID` reads one of its steps all the same.",
            )
        if name.startswith("refs/"):
            self._check_history(name, link, seen)

    def _check_history(self, name: str, link: Link, seen: Seen) -> None:
        """[S-SIG-9]: from the step that was seen the branch came by steps that follow it, or by a signed rewind."""
        at: Link | None = link
        try:
            while at is not None and at != seen.link and at.step > seen.link.step:
                at = self._load(at).parent
        except NotFoundError:
            return  # collected: the order of the statements is all there is
        if at == seen.link or self._rewound(name, link, seen):
            return
        raise ChainError(
            "rewind-unsigned",
            where=f"{self.store.url}, {name}",
            have=f"step {link.step}, {link.id[:12]}, which does not follow step {seen.link.step}",
            need=f"a step after {seen.link.step}, {seen.link.id[:12]}, or a signed rewind",
            hint="The store was taken back under a writer that did not know. `deltackpt log` shows the branch.",
        )

    def _rewound(self, name: str, link: Link, seen: Seen) -> bool:
        """Did enough keys say, later than what was seen, that a step before ``link`` took the branch from elsewhere?"""
        keys, at = self.keys(), link
        while True:
            by_key = self._by_key(at, keys, name)
            later = [[one for one in found if one.statement.time > seen.time] for found in by_key.values()]
            try:
                parent = self._load(at).parent
            except NotFoundError:
                return False
            if sum(any(one.statement.previous != parent for one in found) for found in later) >= keys.threshold:
                return True
            if parent is None or not any(later):
                return False
            at = parent

    def _fresh(self, name: str, moment: int) -> bool:
        """Of a branch; a tag stays."""
        most = self._policy.max_age if name.startswith("refs/") else None
        return most is None or abs(time.time() - moment / 1e6) <= most

    def _stale(self, name: str, link: Link, moment: int) -> ChainError:
        return ChainError(
            "signature-stale",
            where=f"{self.store.url}, {name}",
            have=f"step {link.step}, last signed at {utc(moment / 1e6)}",
            need=f"a signature at most {self._policy.max_age:,.0f} s from now",
            hint="The store is behind, or holds newer steps back, or nothing was published: "
            "`deltackpt sign REPO` says anew where the branch is.",
        )
