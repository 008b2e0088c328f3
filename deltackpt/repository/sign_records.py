"""Signing what is there already, and publishing the keys that may sign (spec/SIGNATURES.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deltackpt.errors import ChainError, ConflictError, NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.format.signature import MAX_KEY_SET, KeySet, SignedKeySet, SignedStatement, decode_keys
from deltackpt.repository import Repository
from deltackpt.repository.edges import record_of
from deltackpt.repository.signer import RecordSigner
from deltackpt.signing import ed25519
from deltackpt.signing.keys import Signer


def sign_records(
    repo: Repository,
    signer: RecordSigner,
    steps: Sequence[str],
    ref: str = "main",
    *,
    whole: bool = False,
    edges: bool = False,
) -> list[SignedStatement]:
    """Sign ``steps``: ``latest`` as what the branch ``ref`` is at, a tag as the tag, a number as a step under no name.

    ``whole``: every step of the branch instead, its newest as what it is at; ``edges``: all edges too. What is signed
    is read first, and has its hash; that it is what its name says, is for the caller to know. Raises NotFoundError
    ``step-missing``, ConflictError ``sign-behind``, and what `Repository.load` raises.
    """
    done = []
    named = list(_chain(repo, ref)) if whole else [_named(repo, step, ref) for step in steps]
    for name, link in named:
        done.append(signer.again(name, link, repo.load(link).parent))
    if edges:
        stored = repo.edges()
        for name in stored.names:
            stored.load(name)
            done.append(signer.again(None, record_of(name), None))
    return done


def _named(repo: Repository, step: str, ref: str) -> tuple[str | None, Link]:
    """What is signed under which name. A signature vouches for its step, which need not be signed yet."""
    if step == "latest":
        head = repo.unproven(f"refs/{ref}")
        if head is None:
            raise repo.absent(ref)
        return f"refs/{ref}", head.link
    if not (step.isascii() and step.isdigit()) and (tag := repo.unproven(f"tags/{step}")) is not None:
        return f"tags/{step}", tag.link
    return None, repo.find_unproven(step, ref)


def _chain(repo: Repository, ref: str) -> Iterator[tuple[str | None, Link]]:
    name, at = _named(repo, "latest", ref)
    yield name, at
    while (parent := repo.load(at).parent) is not None:
        try:
            repo.load(parent)
        except NotFoundError:
            return
        yield None, parent
        at = parent


def newest_keys(repo: Repository) -> SignedKeySet | None:
    """The newest key set in the repository, not proven; None where there is none. Raises FormatError."""
    found = None
    while True:
        name = f"keys/{found.keys.number + 1 if found else 1:08d}.json"
        try:
            raw = repo.store.get(name, MAX_KEY_SET)
        except NotFoundError:
            return found
        found = decode_keys(raw, f"{repo.store.url}/{name}")
        if (found.keys.repository, found.keys.name) != (repo.id, name):
            need = f"set {name} of repository {repo.id}"
            raise ChainError("keys-wrong", where=f"{repo.store.url}/{name}", have="another key set", need=need)


def publish_keys(repo: Repository, keys: KeySet, signers: Sequence[Signer]) -> SignedKeySet:
    """Publish the next key set, signed by all of ``signers`` -> it. It has the keys, threshold and end of ``keys``.

    Raises ChainError ``keys-wrong`` where they are too few for the set before or for this one, or the set has nothing
    new, ConflictError ``object-exists`` where another one was faster.
    """
    before = newest_keys(repo)
    number = before.keys.number + 1 if before else max(keys.number, 0) + 1
    new = KeySet(repo.id, number, keys.keys, keys.threshold, keys.expires)
    message = new.encode()
    by = sorted((sign(message) for sign in signers), key=lambda one: one.key)
    good = {one.key for one in by if ed25519.verify(one, message)}
    for one, what in ((new, "the new keys"), *([(before.keys, "the keys before")] if before else [])):
        if len(good & {*one.keys}) < one.threshold:  # [S-SIG-10]
            have = f"signatures of {len(good & {*one.keys})} of {what}"
            raise ChainError(
                "keys-wrong",
                where=f"{repo.store.url}/{new.name}",
                have=have,
                need=f"{one.threshold} of them",
                hint="Give --sign for each key that has to agree.",
            )
    signed = SignedKeySet(new, tuple({one.key: one for one in by}.values()))
    try:
        repo.store.put(new.name, [signed.encode()])
    except ConflictError as error:
        error.hint = error.hint or "Another key set was published meanwhile."
        raise
    return signed
