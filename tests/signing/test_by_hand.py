"""What an attacker does to a store by hand, object by object: a reader takes the signed step, or says why not."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.signed import statement
from support.signed_by_hand import Scene, store_of
from support.states import tree

from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import File, Link
from deltackpt.format.signature import KeySet, SignedKeySet, Statement, decode_keys
from deltackpt.repository import Repository
from deltackpt.repository.signatures import signature_name
from deltackpt.restore.materialize import apply
from deltackpt.signing.keys import PrivateKey
from deltackpt.signing.policy import TrustPolicy

KEY, SECOND = PrivateKey.generate(), PrivateKey.generate()
ORDER = 2**252 + 27742317777372353535851937790883648493  # of the group of ed25519
Attack = Callable[[Scene], object]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, KEY, SECOND)


def signature_of_head(s: Scene) -> str:
    return s.signatures(s.main[-1])[-1]


def cut(s: Scene, name: str, size: int | None, more: bytes = b"") -> None:
    s.objects[name] = s.objects[name][:size] + more


def dev_signed_as_main(s: Scene) -> None:
    s.point(s.dev[-1])
    s.copy_signatures(s.main[-1], s.dev[-1])


def malleated(s: Scene) -> None:
    def change(value: dict[str, str]) -> None:
        raw = bytes.fromhex(value["signature"])
        more = int.from_bytes(raw[32:], "little") + ORDER
        value["signature"] = (raw[:32] + more.to_bytes(32, "little")).hex()

    s.edit(signature_of_head(s), change)


def later(s: Scene) -> None:
    name = signature_of_head(s)
    head, _, tail = name.rpartition("-")
    time_ = int(tail[:16]) + 10**9
    s.edit(name, lambda value: value["statement"].update(time=time_), f"{head}-{time_:016d}.json")
    del s.objects[name]


def twice(s: Scene) -> None:
    name = signature_of_head(s)
    s.objects[name] = s.objects[name][:-1] + b',"statement":{}}'


def keys_by_mallory(s: Scene) -> SignedKeySet:
    new = KeySet(s.identity, 3, (s.mallory.public,))
    return SignedKeySet(new, (s.mallory(new.encode()),))


def put_keys(s: Scene, signed: SignedKeySet) -> None:
    s.objects[signed.keys.name] = signed.encode()


def keys_with_an_old_signature(s: Scene) -> None:
    by = decode_keys(s.objects["keys/00000002.json"], "keys").by
    put_keys(s, SignedKeySet(keys_by_mallory(s).keys, (*by, *keys_by_mallory(s).by)))


def own_keys_added(s: Scene) -> None:
    s.edit("keys/00000002.json", lambda value: value["keys"].update(keys=sorted([KEY.public, s.mallory.public])))


def another_marker(s: Scene) -> None:
    s.edit("deltackpt.json", lambda value: value.update(repository="ab" * 16))


def equal_sizes(s: Scene, what: str) -> None:
    names = list(dict.fromkeys(s.state(link, what) for link in (s.main[-1], s.main[-2], *s.left_behind, *s.dev)))
    pairs = [(a, b) for a in names[:1] for b in names[1:] if s.objects[a] != s.objects[b]]
    same = [(a, b) for a, b in pairs if len(s.objects[a]) == len(s.objects[b])]
    s.swap(*(same or pairs)[0])


def parts_of(s: Scene, link: Link) -> list[str]:
    return [f.name for f in s.world.repo.load(link).patch or ()]


def flip(s: Scene, names: list[str], at: int = -1) -> None:
    for name in names:
        raw = bytearray(s.objects[name])
        raw[at] ^= 1
        s.objects[name] = bytes(raw)


def pad(s: Scene) -> None:
    """Another step's part under this name, cut or filled to the same size."""
    mine, other = parts_of(s, s.main[-1])[0], parts_of(s, s.main[-2])[0]
    size = len(s.objects[mine])
    s.objects[mine] = s.objects[other][:size].ljust(size, b"\0")


def forged_head(s: Scene) -> Link:
    link = s.forge_manifest(s.main[-1], metadata={"by": "mallory"})
    s.point(link)
    s.copy_signatures(s.main[-1], link)
    return link


def forged_with_own_statement(s: Scene) -> None:
    link = forged_head(s)
    said = Statement(s.identity, "refs/main", link, s.main[-2], time.time_ns() // 1000)
    for key in (None, KEY.public):
        one = statement(s.mallory, said, key=key)
        s.objects[signature_name(one)] = one.encode()


def forged_in_a_pack(s: Scene) -> None:
    """A pack whose hash is right, with a manifest of his own in the place of one that he removed."""
    old = s.main[-2]
    new = s.forge_manifest(old, metadata={"by": "mallory"})
    raw = s.objects.pop(new.name) + b"\n"
    del s.objects[old.name]
    for name in s.names("packs/"):
        del s.objects[name]
    s.objects[f"packs/{old.step:08d}-{old.step:08d}-1-{hashlib.sha256(raw).hexdigest()}.jsonl"] = raw


def changed_pack(s: Scene) -> None:
    flip(s, s.names("packs/"), 40)
    for link in s.main[:-1]:
        del s.objects[link.name]


def another_edge(s: Scene, *, signed: bool) -> None:
    """The fold's bytes changed, their hash put right in an edge of his own, with the signature of the true one."""
    fold = next(name for name in s.names("folds/"))
    bad = bytearray(s.objects[fold])
    bad[-1] ^= 1
    copy = fold.replace("part-0", "part-1") if "part-0" in fold else f"{fold}x"
    s.objects[copy] = bytes(bad)
    for name in s.names("edges/"):
        raw = s.objects[name].replace(fold.encode(), copy.encode())
        raw = raw.replace(
            hashlib.sha256(s.objects[fold]).hexdigest().encode(), hashlib.sha256(bad).hexdigest().encode()
        )
        if raw == s.objects[name]:
            continue
        id_ = hashlib.sha256(raw).hexdigest()
        s.objects[f"{name[:-69]}{id_}.json"] = raw
        if signed:
            old = Link(int(name[6:-70]), name[-69:-5])
            s.copy_signatures(old, Link(old.step, id_))
        del s.objects[name]


def no_step_two(s: Scene) -> None:
    """Of the steps of number 2 he leaves that which was signed for another branch, and breaks the way there."""
    for link in (s.main[2], s.main[3], *s.left_behind):
        s.objects.pop(link.name, None)
    for name in s.names("packs/"):
        del s.objects[name]


def left_behind_two(s: Scene) -> None:
    for link in (s.main[2], s.main[3], *s.dev):
        s.objects.pop(link.name, None)
    for name in s.names("packs/"):
        del s.objects[name]


def junk(s: Scene) -> None:
    folder = signature_of_head(s).rpartition("/")[0]
    for number in range(1100):
        s.objects[f"{folder}/{KEY.public[:16]}-{9 * 10**15 + number}.json"] = b"{}"


def copies(s: Scene) -> None:
    name = signature_of_head(s)
    for number in range(70):
        s.objects[f"{name[:-21]}{9 * 10**15 + number}.json"] = s.objects[name]


def drop(s: Scene, folder: str, part: str = "") -> None:
    for name in s.names(folder, part):
        del s.objects[name]


def upper(s: Scene) -> None:
    s.edit(signature_of_head(s), lambda value: value.update(key=value["key"].upper()))


def wrong_number(s: Scene) -> None:
    s.point(Link(s.main[-1].step + 7, s.main[-1].id))


def yesterday(s: Scene) -> None:
    """Branch, and all signatures but old ones, as they were."""
    s.point(s.main[-2])
    for name in s.signatures(s.main[-1]):
        del s.objects[name]
    del s.objects[s.main[-1].name]


def relabeled(s: Scene) -> None:
    """The tag's signature told as the branch's."""
    s.point(s.best)
    for name in s.signatures(s.best):
        s.edit(name, lambda value: value["statement"].update(ref="refs/main"))


def borrowed_rewind(s: Scene) -> None:
    """The statement that took main back is put beside a step of dev, to which main is moved."""
    s.copy_signatures(s.main[2], s.dev[-1])
    s.point(s.dev[-1])


def another_layout(s: Scene) -> None:
    """A manifest of his own that names another step's layout, in the place of the true one."""
    old, other = s.main[-1], s.world.repo.load(s.dev[0])
    new = s.forge_manifest(old, layout=other.layout, digests=other.digests)
    s.objects[old.name] = s.objects.pop(new.name)


def unsigned_anchor(s: Scene) -> None:
    """The head told to be a whole checkpoint: another step's anchor."""
    anchor = next(name for name in s.names("anchors/") if name.endswith(".safetensors"))
    raw = s.objects[anchor]
    file = File(anchor, len(raw), hashlib.sha256(raw).hexdigest())
    link = s.forge_manifest(s.main[-1], anchor=(file,), patch=None)
    s.objects[s.main[-1].name] = s.objects[link.name]


ATTACKS: dict[str, Attack] = {
    "main is at dev's head": lambda s: s.point(s.dev[-1]),
    "main is at dev's head, with main's signature": lambda s: (
        s.point(s.dev[-1]),
        s.copy_signatures(s.main[-1], s.dev[-1]),
    ),
    "two branches change signatures": lambda s: s.swap(s.signatures(s.dev[-1])[-1], signature_of_head(s)),
    "main is at a step that was left behind": lambda s: s.point(s.left_behind[-1]),
    "main is at the step before": lambda s: s.point(s.main[-2]),
    "main is as it was yesterday": yesterday,
    "main is gone": lambda s: s.objects.pop("refs/main.json"),
    "main is empty": lambda s: cut(s, "refs/main.json", 0),
    "main has another step number": wrong_number,
    "main has a space": lambda s: cut(s, "refs/main.json", None, b" "),
    "tag and branch change places": lambda s: s.swap("tags/best.json", "refs/main.json"),
    "the tag is at another signed step": lambda s: s.point(s.main[0], "tags/best"),
    "the tag's signature is told as the branch's": relabeled,
    "a signed rewind is borrowed": borrowed_rewind,
    "a statement is later": later,
    "a signature has another form, which is as true": malleated,
    "a key in capitals": upper,
    "a statement is said twice in one object": twice,
    "a signature with a line's end": lambda s: s.objects.update(
        {signature_of_head(s): s.objects[signature_of_head(s)] + b"\n"}
    ),
    "half a signature": lambda s: cut(s, signature_of_head(s), 200),
    "no signatures": lambda s: drop(s, "signatures/"),
    "a thousand names of signatures": junk,
    "the same signature under later names": copies,
    "half a key set": lambda s: cut(s, "keys/00000001.json", 150),
    "half the newest key set": lambda s: s.objects.update(
        {"keys/00000002.json": s.objects["keys/00000002.json"][:150]}
    ),
    "the newest key set is gone": lambda s: s.objects.pop("keys/00000002.json"),
    "all key sets are gone": lambda s: drop(s, "keys/"),
    "the first key set again": lambda s: s.objects.update({"keys/00000003.json": s.objects["keys/00000001.json"]}),
    "a key set of his own": lambda s: put_keys(s, keys_by_mallory(s)),
    "a key set of his own with an old signature": keys_with_an_old_signature,
    "his key in the newest set": own_keys_added,
    "another repository's marker": another_marker,
    "layouts change places": lambda s: equal_sizes(s, "layout"),
    "digests change places": lambda s: equal_sizes(s, "digests"),
    "parts change places": lambda s: s.swap(parts_of(s, s.main[-1])[0], parts_of(s, s.main[-2])[0]),
    "another step's part, of the right size": pad,
    "a bit of a part": lambda s: flip(s, parts_of(s, s.main[-1])[:1], -9),
    "a bit of each anchor": lambda s: flip(s, s.names("anchors/", "model"), -5),
    "a byte of config.json": lambda s: flip(s, s.names("", "config.json")),
    "a forged head with the true one's signature": forged_head,
    "a forged head with statements of his own": forged_with_own_statement,
    "another manifest in the head's place": lambda s: s.swap(s.main[-1].name, s.main[-2].name),
    "a layout of another step in the head's place": another_layout,
    "an anchor of another step as the head": unsigned_anchor,
    "a forged manifest in a pack": forged_in_a_pack,
    "packs that were changed": changed_pack,
    "an edge of his own": lambda s: another_edge(s, signed=False),
    "an edge of his own with the true one's signature": lambda s: another_edge(s, signed=True),
    "a fold's bytes": lambda s: flip(s, s.names("folds/")),
    "of step 2 only that of dev": no_step_two,
}


@pytest.mark.parametrize("what", ATTACKS)
def test_the_signed_step_or_none(scene: Scene, what: str, tmp_path: Path) -> None:
    before = dict(scene.objects)
    ATTACKS[what](scene)
    assert scene.objects != before
    taken = {}
    for ask, right in scene.right.items():
        try:
            taken[ask] = scene.reader().find(ask)
        except DeltackptError:
            taken[ask] = None
        assert taken[ask] in (None, right), ask
    out = tmp_path / "restored"
    try:
        done = apply(scene.reader(), out, threads=1)
    except DeltackptError:
        assert not out.exists()
        return
    assert done.id == scene.right["latest"].id
    assert tree(out) == scene.world.trees[done.id]
    shutil.rmtree(out)


def test_all_is_right_before(scene: Scene, tmp_path: Path) -> None:
    done = apply(scene.reader(), tmp_path / "restored", threads=1)
    assert tree(tmp_path / "restored") == scene.world.trees[done.id]
    assert len(ATTACKS) > 45


def test_a_number_to_which_the_branch_no_longer_leads_is_one_that_was_signed_for_it(scene: Scene) -> None:
    """Where the way is broken, a rewind and a gc look alike: docs/signing.md says what to give instead."""
    left_behind_two(scene)
    assert scene.reader().find(2) == scene.left_behind[0]
    right = scene.right["2"]
    with pytest.raises(DeltackptError, match="step-missing"):
        scene.reader().find(f"{right.step}-{right.id[:12]}")


@pytest.mark.parametrize("skew", [-7200.0, 7200.0])
def test_a_clock_that_is_off_says_that_the_branch_is_old(
    scene: Scene, skew: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh() -> Repository:
        return Repository.at(store_of(scene.url, scene.objects)).secure(TrustPolicy(scene.trusted, 3600))

    assert fresh().find("latest") == scene.right["latest"]
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + skew)
    with pytest.raises(DeltackptError, match="signature-stale"):
        fresh().find("latest")
