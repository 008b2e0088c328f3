"""Whom a reader trusts: a file of public keys, one key, or the key that signed at first use."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from deltackpt.errors import UsageError
from deltackpt.format.manifest import MAX_STEP, REPOSITORY_ID
from deltackpt.format.signature import MAX_KEYS, KeySet
from deltackpt.signing import openssh
from deltackpt.util.places import expanded

TRUST, MAX_AGE = "DELTACKPT_TRUST", "DELTACKPT_MAX_AGE"
FIRST_USE = "first-use"
_MOST = 64 << 10  # bytes of a file of keys


@dataclass(frozen=True)
class TrustPolicy:
    """``root``: the key set that a reader was given; None to trust, on first use, the key that signed.

    ``max_age``: seconds that the newest statement about a branch may be old, None for any age. Raises UsageError
    ``usage`` for one that is no number above 0.
    """

    root: KeySet | None
    max_age: float | None = None

    def __post_init__(self) -> None:
        if self.max_age is not None and not 0 < self.max_age < math.inf:
            raise UsageError("usage", where="max age", have=self.max_age, need="seconds, more than 0")


def trust_policy(
    trust: str | os.PathLike[str] | TrustPolicy | None = None, max_age: float | None = None
) -> TrustPolicy | None:
    """The policy that is meant by the path of a file of keys, a public key's line, or ``first-use``; None: by the
    environment, ``DELTACKPT_TRUST`` and ``DELTACKPT_MAX_AGE`` (seconds). None where that says nothing.

    Raises UsageError ``trust-file``, and ``usage`` for a ``max_age`` without a key to trust.
    """
    if isinstance(trust, TrustPolicy):
        return trust if max_age is None else replace(trust, max_age=max_age)
    given = os.environ.get(TRUST, "").strip() if trust is None else os.fspath(trust).strip()
    if max_age is None and (text := os.environ.get(MAX_AGE, "").strip()):
        try:
            max_age = float(text)
        except ValueError:
            raise UsageError("usage", where=MAX_AGE, have=repr(text)[:40], need="seconds, more than 0") from None
    if not given:
        if trust is not None:
            raise _unusable("--trust", "nothing", f"a file of public keys, or {FIRST_USE}")
        if max_age is not None:
            have, need = "a time without keys", f"keys to trust: --trust KEYS, or {TRUST}"
            raise UsageError("usage", where="max age", have=have, need=need)
        return None
    if given == FIRST_USE:
        return TrustPolicy(None, max_age)
    if given.startswith("ssh-"):
        return TrustPolicy(parse_keys(given, "the key to trust"), max_age)
    path = expanded(given)
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST + 1)
        return TrustPolicy(parse_keys(raw.decode(), path), max_age)
    except OSError as error:
        raise _unusable(path, error.strerror or "an error", f"a file of public keys, or {FIRST_USE}") from None
    except UnicodeError:
        raise _unusable(path, "no text", "a file of public keys") from None


def parse_keys(text: str, where: object) -> KeySet:
    """The key set in a file of keys: a line for each public key as OpenSSH writes it, ``#`` before comments, and

        threshold 2          how many of them have to sign (1)
        repository <id>      of which repository (any)
        number 3             of which key set in the repository these are the keys (0: of none)
        expires 2027-01-31   until when (always)

    Raises UsageError ``trust-file``.
    """
    if len(text) > _MOST:
        raise _unusable(where, f"more than {_MOST:,} characters", "a file of public keys")
    keys: set[str] = set()
    said: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        at = f"{where}, line {number}"
        if words[0].startswith("-"):
            raise _unusable(
                at, "no public key", "a line of OpenSSH", "The public key is in the file that ends in .pub."
            )
        if words[0] in ("threshold", "repository", "number", "expires"):
            if len(words) != 2 or words[0] in said:
                raise _unusable(at, f"{words[0]} without one value, or twice", f"{words[0]} and its value, once")
            said[words[0]] = words[1]
            continue
        try:
            keys.add(openssh.public_key(line))
        except ValueError:
            raise _unusable(at, "no ed25519 key", "a line such as `ssh-ed25519 AAAA… name`") from None
    if not 0 < len(keys) <= MAX_KEYS:
        raise _unusable(where, f"{len(keys)} keys", f"1 to {MAX_KEYS}")
    threshold = _whole(said.get("threshold", "1"), 1, len(keys), f"{where}, threshold")
    repository = said.get("repository")
    if repository is not None and not REPOSITORY_ID.fullmatch(repository):
        raise _unusable(f"{where}, repository", repr(repository)[:80], "32 hex digits, as deltackpt.json has them")
    number = _whole(said.get("number", "0"), 0, MAX_STEP, f"{where}, number")
    expires = _day(said["expires"], f"{where}, expires") if "expires" in said else None
    return KeySet(repository, number, tuple(sorted(keys)), threshold, expires)


def show_keys(keys: KeySet) -> list[str]:
    """The lines of a file of keys that says this; `parse_keys` reads them."""
    lines = [] if keys.repository is None else [f"repository {keys.repository}"]
    if keys.number:
        lines.append(f"number {keys.number}")
    lines.append(f"threshold {keys.threshold}")
    if keys.expires is not None:
        lines.append(f"expires {datetime.fromtimestamp(keys.expires, timezone.utc):%Y-%m-%dT%H:%M:%S+00:00}")
    return [*lines, *map(openssh.public_line, keys.keys)]


def _whole(text: str, least: int, most: int, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 17 and least <= int(text) <= most):
        raise _unusable(where, repr(text)[:80], f"a whole number from {least} to {most}")
    return int(text)


def _day(text: str, where: str) -> int:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise _unusable(where, repr(text)[:80], "a day such as 2027-01-31, UTC") from None
    return int((found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp())


def _unusable(where: object, have: str, need: str, hint: str = "") -> UsageError:
    return UsageError("trust-file", where=where, have=have, need=need, hint=hint)
