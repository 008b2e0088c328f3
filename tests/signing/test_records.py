"""Signatures and key sets as records, and a reader's files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.signed import key_of, keys_of

from deltackpt.errors import FormatError, UsageError
from deltackpt.format.canonical import dumps
from deltackpt.format.manifest import Link
from deltackpt.format.signature import (
    KeySet,
    SignedKeySet,
    SignedStatement,
    Statement,
    decode_keys,
    decode_signature,
)
from deltackpt.signing.keys import signer
from deltackpt.signing.memory import Seen, TrustMemory, check_place
from deltackpt.signing.openssh import public_line
from deltackpt.signing.policy import TrustPolicy, parse_keys, show_keys, trust_policy

KEY, OTHER = key_of(1), key_of(2)
LINK = Link(7, "ab" * 32)
SAID = Statement("cd" * 16, "refs/main", LINK, Link(6, "ef" * 32), 1_700_000_000_000_000)
SIGNED = SignedStatement(SAID, KEY(SAID.encode()))
SET = KeySet("cd" * 16, 1, tuple(sorted((KEY.public, OTHER.public))), 2, 1_900_000_000)


def changed(raw: bytes, path: str, value: object) -> bytes:
    """A record with one field set, or with ``...`` removed."""
    tree = json.loads(raw)
    *above, last = path.split("/")
    at = tree
    for name in above:
        at = at[name]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return dumps(tree)


def test_they_come_back() -> None:
    assert decode_signature(SIGNED.encode(), "here") == SIGNED
    plain = replace(SIGNED, statement=replace(SAID, ref=None, previous=None))
    assert decode_signature(plain.encode(), "here") == plain
    signed = SignedKeySet(SET, (KEY(SET.encode()), OTHER(SET.encode())))
    assert decode_keys(signed.encode(), "here") == signed


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        ("key", KEY.public[:-1], "signature-field"),
        ("key", KEY.public.upper(), "signature-field"),
        ("key", 7, "signature-field"),
        ("signature", "0" * 127, "signature-field"),
        ("signature", ..., "signature-field"),
        ("more", 1, "signature-field"),
        ("statement", [], "signature-field"),
        ("statement/format", "deltackpt-keys", "signature-field"),
        ("statement/version", 2, "version-unknown"),
        ("statement/version", True, "version-unknown"),
        ("statement/more", 1, "signature-field"),
        ("statement/previous", ..., "signature-field"),
        ("statement/previous", {"step": 6}, "signature-field"),
        ("statement/ref", "main", "signature-field"),
        ("statement/ref", "refs/../x", "signature-field"),
        ("statement/ref", "refs/main\n", "signature-field"),
        ("statement/repository", "cd" * 15, "signature-field"),
        ("statement/step", -1, "signature-field"),
        ("statement/step", 10**15 + 1, "signature-field"),
        ("statement/id", "AB" * 32, "signature-field"),
        ("statement/time", "1", "signature-field"),
        ("statement/time", (1 << 53) + 1, "signature-field"),
    ],
)
def test_signatures_in_another_form(path: str, value: object, code: str) -> None:
    with pytest.raises(FormatError) as caught:
        decode_signature(changed(SIGNED.encode(), path, value), "here")
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "json-syntax"),
        (b"[]", "signature-field"),
        (SIGNED.encode() + b"\n", "manifest-canonical"),
        (b" " * 5000, "json-too-long"),
        (SIGNED.encode().replace(b'"step":7', b'"step":7,"step":8', 1), "json-duplicate-key"),
        (SIGNED.encode().replace(b'"step":7', b'"step":7.0', 1), "json-number"),
    ],
)
def test_other_bytes(raw: bytes, code: str) -> None:
    with pytest.raises(FormatError) as caught:
        decode_signature(raw, "here")
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("keys/keys", []),
        ("keys/keys", [KEY.public, KEY.public]),
        ("keys/keys", sorted((KEY.public, OTHER.public))[::-1]),
        ("keys/keys", [f"{number:064x}" for number in range(33)]),
        ("keys/threshold", 0),
        ("keys/threshold", 3),
        ("keys/expires", -1),
        ("keys/number", "1"),
        ("keys/more", 1),
        ("keys/format", "deltackpt-statement"),
        ("signatures", {}),
        ("signatures", [{"key": KEY.public, "signature": "0" * 128}] * 33),
        ("signatures", [7]),
    ],
)
def test_key_sets_in_another_form(path: str, value: object) -> None:
    raw = SignedKeySet(SET, (KEY(SET.encode()),)).encode()
    with pytest.raises(FormatError) as caught:
        decode_keys(changed(raw, path, value), "here")
    assert caught.value.code == "signature-field"


def test_a_file_of_keys() -> None:
    text = f"# ours\n\nthreshold 2\nrepository {'cd' * 16}\nnumber 3\nexpires 2027-01-31\n"
    text += f"{public_line(KEY.public, 'a trainer')}\n{public_line(OTHER.public)}\n"
    found = parse_keys(text, "KEYS")
    assert (found.threshold, found.repository, found.number) == (2, "cd" * 16, 3)
    assert found.expires == 1_801_353_600
    assert {*found.keys} == {KEY.public, OTHER.public}
    assert parse_keys("\n".join(show_keys(found)), "KEYS") == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "threshold 1",
        "ssh-rsa AAAAB3NzaC1yc2E=",
        "ssh-ed25519 AAAA",
        "ssh-ed25519",
        f"threshold 2\n{public_line(KEY.public)}",
        f"threshold 0\n{public_line(KEY.public)}",
        f"threshold 1\nthreshold 1\n{public_line(KEY.public)}",
        f"threshold\n{public_line(KEY.public)}",
        f"repository here\n{public_line(KEY.public)}",
        f"expires soon\n{public_line(KEY.public)}",
        f"number -1\n{public_line(KEY.public)}",
        "x" * 70_000,
    ],
)
def test_files_that_are_none(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_keys(text, "KEYS")
    assert caught.value.code == "trust-file"


def test_the_home_of_a_user_that_there_is_not() -> None:
    with pytest.raises(UsageError, match="trust-file"):
        trust_policy("~no-such-user/keys")
    with pytest.raises(UsageError, match="sign-key"):
        signer("~no-such-user/key")


def test_what_a_policy_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = public_line(KEY.public)
    assert trust_policy() is None
    monkeypatch.setenv("DELTACKPT_TRUST", line)
    assert trust_policy() == TrustPolicy(keys_of(KEY))
    monkeypatch.setenv("DELTACKPT_MAX_AGE", "90")
    assert trust_policy() == TrustPolicy(keys_of(KEY), 90.0)
    assert trust_policy("first-use", 5.0) == TrustPolicy(None, 5.0)
    for value in ("soon", "nan", "0", "-1", "inf"):
        monkeypatch.setenv("DELTACKPT_MAX_AGE", value)
        with pytest.raises(UsageError):
            trust_policy()
    monkeypatch.setenv("DELTACKPT_MAX_AGE", "90")
    monkeypatch.setenv("DELTACKPT_TRUST", "")
    with pytest.raises(UsageError, match="keys to trust"):
        trust_policy()
    monkeypatch.delenv("DELTACKPT_MAX_AGE")
    for path in (tmp_path, tmp_path / "no", ""):
        with pytest.raises(UsageError) as caught:
            trust_policy(path)
        assert caught.value.code == "trust-file"
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="no text"):
        trust_policy(tmp_path / "binary")


def test_a_memory_that_is_damaged_is_no_empty_one(own_memory: Path) -> None:
    here = TrustMemory("ab" * 16)
    here.learn("refs/main", Seen(LINK, 5))
    here.learn("refs/main", Seen(Link(1, "00" * 32), 4))
    assert TrustMemory("ab" * 16).seen("refs/main") == Seen(LINK, 5)
    assert TrustMemory("cd" * 16).seen("refs/main") is None
    path = own_memory / f"{'ab' * 16}.json"
    path.write_bytes(b"")  # all that a power cut may leave
    assert TrustMemory("ab" * 16).seen("refs/main") is None
    for raw in (b"[]", b"{", b'{"seen refs/main":1}', b'{"seen refs/main":{"id":"","step":1,"time":1}}'):
        path.write_bytes(raw)
        with pytest.raises(UsageError, match="trust-memory"):
            TrustMemory("ab" * 16).seen("refs/main")


def test_a_memory_of_keys_that_is_damaged_is_no_empty_one(own_memory: Path) -> None:
    TrustMemory("ab" * 16).learn_keys(None, SET)
    assert TrustMemory("ab" * 16).keys(None) == SET
    path = own_memory / f"{'ab' * 16}.keys.json"
    whole = json.loads(path.read_bytes())
    for damaged in (1, None, {}, {**whole["set"], "number": "1"}):
        path.write_bytes(dumps({**whole, "set": damaged}))
        for use in (lambda: TrustMemory("ab" * 16).keys(None), lambda: TrustMemory("ab" * 16).learn_keys(None, SET)):
            with pytest.raises(UsageError, match="trust-memory"):
                use()


def test_a_memory_that_cannot_be_written_lasts_as_long_as_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    here = TrustMemory("ab" * 16, tmp_path / "file" / "below")
    here.learn("refs/main", Seen(LINK, 5))
    assert here.seen("refs/main") == Seen(LINK, 5)
    check_place("file:///x", "ab" * 16, tmp_path / "file" / "below")
    assert "not remembered" in caplog.text
