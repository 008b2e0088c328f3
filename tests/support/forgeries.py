"""An attacker who can write to a store, and has read all of its past: what he puts there, from a seed.

He has keys of his own, another repository that the same key signs, and every state that the store was in. What he lacks
is the signer's private key.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deltackpt.format.canonical import dumps
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import File, Link, Manifest, decode
from deltackpt.format.signature import KeySet, SignedKeySet, SignedStatement, Statement, decode_signature
from deltackpt.repository import Ref
from deltackpt.repository.signatures import signature_name
from deltackpt.signing.keys import PrivateKey
from support.signed import statement

Objects = dict[str, bytes]
MANIFEST, SIGNATURE = "steps/", "signatures/"
PAYLOADS = ("anchors/", "patches/", "states/", "folds/")


@dataclass
class Attacker:
    """``past``: the states of the store, the last one as it is; ``other``: those of another repository's."""

    past: Sequence[Objects]
    other: Objects
    signer: str  # the public key that readers trust
    identity: str

    def attack(self, seed: int) -> tuple[Objects, str]:
        """The store after one attack, or a mix of a few, and their names."""
        rng = random.Random(seed)
        mallory = PrivateKey(_seeded(rng))
        objects, names = dict(self.past[-1]), []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            one = rng.choice(ATTACKS)
            one(self, rng, objects, mallory)
            names.append(one.__name__)
        return objects, " + ".join(names)

    # What he has

    def links(self, objects: Objects) -> list[Link]:
        """The steps of a store."""
        return [Link(int(name[6:-70]), name[-69:-5]) for name in sorted(objects) if name.startswith(MANIFEST)]

    def statements(self, objects: Objects) -> list[SignedStatement]:
        """All that was ever signed there, as far as it can be read."""
        found = []
        for name, raw in sorted(objects.items()):
            if name.startswith(SIGNATURE):
                try:
                    found.append(decode_signature(raw, name))
                except Exception:  # one that an earlier attack has damaged
                    continue
        return found

    def point(self, objects: Objects, link: Link, name: str = "refs/main") -> None:
        """Move a branch or tag."""
        objects[f"{name}.json"] = Ref.to("x", link).raw

    def put(self, objects: Objects, one: SignedStatement) -> None:
        """Put a signature where a reader looks for it."""
        objects[signature_name(one)] = one.encode()

    def forged(self, rng: random.Random, objects: Objects) -> tuple[Link, Manifest] | None:
        """A manifest of his own, which names other bytes, or another past."""
        raw = objects.get(rng.choice(self.links(objects)).name, b"")
        try:
            found = decode(raw, "manifest")
        except Exception:
            return None
        bad = b"other bytes %d" % rng.randrange(1 << 30)
        file = File(
            f"patches/{found.step:08d}-{rng.randrange(1 << 48):012x}/part-00001.safetensors", len(bad), "0" * 64
        )
        new = rng.choice(
            (
                replace(found, step=found.step + rng.randrange(1, 9)),
                replace(found, state=f"{rng.randrange(1 << 255):064x}"),
                replace(found, anchor=(file,)),
                replace(found, metadata={"note": rng.random().hex()}),
                replace(found, time=found.time + 1),
                replace(found, digests=file),
            )
        )
        objects[file.name] = bad
        link = new.link
        objects[link.name] = new.encode()
        return link, new


def _seeded(rng: random.Random) -> object:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(rng.randbytes(32))


def old_branch(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """The branch goes back to a step that was signed."""
    by.point(objects, rng.choice(by.links(objects)))


def old_branch_said_anew(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """The same, and the signature gets a later time."""
    link = rng.choice(by.links(objects))
    by.point(objects, link)
    for one in by.statements(objects):
        if one.statement.link == link:
            later = replace(one.statement, time=one.statement.time + rng.randrange(1 << 40))
            by.put(objects, replace(one, statement=later))


def old_store(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """All as it was before."""
    objects.clear()
    objects.update(rng.choice(by.past))


def forged_step(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """A manifest that nobody signed."""
    if (made := by.forged(rng, objects)) is not None:
        by.point(objects, made[0], rng.choice(("refs/main", "refs/main", "refs/dev", "tags/best")))


def forged_and_signed(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """A manifest that he signs himself, under his own name or the signer's."""
    if (made := by.forged(rng, objects)) is None:
        return
    by.point(objects, made[0])
    name = rng.choice(("refs/main", "refs/dev", "tags/best", None))
    said = Statement(by.identity, name, made[0], made[1].parent, 1 << 52)
    by.put(objects, statement(key, said, key=rng.choice((None, by.signer))))


def borrowed_signature(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """A signature of something else, with its statement changed to fit, or as it is."""
    target = rng.choice(by.links(objects))
    if rng.random() < 0.7 and (made := by.forged(rng, objects)) is not None:
        target = made[0]
    by.point(objects, target)
    pool = by.statements(objects) + by.statements(by.other)
    if not pool:
        return
    one = rng.choice(pool)
    said = replace(one.statement, link=target)
    if rng.random() < 0.5:
        said = replace(said, repository=by.identity, ref="refs/main", time=one.statement.time + rng.randrange(9))
    by.put(objects, replace(one, statement=said))
    folder = f"signatures/{target.step:08d}-{target.id}/"
    objects[f"{folder}{one.by.key[:16]}-{rng.randrange(1 << 52):016d}.json"] = one.encode()


def other_branch(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """A branch or tag at what another one is at."""
    names = [name for name in objects if name.startswith(("refs/", "tags/"))]
    objects[rng.choice(names)] = objects[rng.choice(names)]


def other_repository(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """Objects of another repository of the same signer, with its marker or without."""
    whole = rng.random() < 0.3
    for name, raw in by.other.items():
        if whole or name.startswith(("steps/", "signatures/", *PAYLOADS)) or rng.random() < 0.3:
            objects[name] = raw


def own_keys(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """A key set that names him, signed by him, or in the signer's name."""
    number = rng.choice((1, 2, 2, 3))
    keys = tuple(sorted({key.public, *rng.choice(((), (by.signer,)))}))
    new = KeySet(rng.choice((by.identity, "ab" * 16)), number, keys, rng.choice((1, len(keys))))
    made = [key(new.encode())]
    if rng.random() < 0.5:
        made.append(replace(made[0], key=by.signer))
    objects[f"keys/{rng.choice((number, 1, 2)):08d}.json"] = SignedKeySet(new, tuple(made)).encode()
    forged_and_signed(by, rng, objects, key)


def less(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """Some objects are gone."""
    folder = rng.choice((SIGNATURE, MANIFEST, "refs/", "keys/", "", "patches/", "edges/"))
    for name in [name for name in objects if name.startswith(folder)]:
        if rng.random() < 0.4:
            del objects[name]


def flipped(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """Bits of any object."""
    folder = rng.choice((SIGNATURE, MANIFEST, "refs/", "anchors/", "patches/", "states/", "edges/", "folds/", "keys/"))
    for name in [name for name in objects if name.startswith(folder) and objects[name]]:
        if rng.random() < 0.6:
            raw = bytearray(objects[name])
            for _ in range(rng.choice((1, 1, 3))):
                raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            objects[name] = bytes(raw)


def swapped(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """Two objects of a kind change places."""
    folder = rng.choice((SIGNATURE, MANIFEST, "anchors/", "patches/", "states/", "edges/"))
    names = [name for name in objects if name.startswith(folder)]
    if len(names) > 1:
        a, b = rng.sample(names, 2)
        objects[a], objects[b] = objects[b], objects[a]


def retold(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """JSON of a signature, said in another way, or with other fields."""
    names = [name for name in objects if name.startswith(SIGNATURE)]
    for name in rng.sample(names, min(3, len(names))):
        try:
            value = json.loads(objects[name])
            said = value["statement"]
        except (ValueError, KeyError, TypeError):
            continue
        field = rng.choice((*said, "more"))
        said[field] = rng.choice((None, 0, -1, "", [], {"id": "0" * 64, "step": 0}, "refs/main", said.get(field)))
        raw = rng.choice((dumps(value), json.dumps(value).encode(), objects[name] + b" "))
        objects[rng.choice((name, name.replace("-1", "-2")))] = raw


def false_way(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """A fold, or a later anchor, of other bytes, which may be signed by him or by a signature of another edge."""
    links = by.links(objects)
    end = rng.choice(links)
    raw = objects.get(rng.choice([name for name in objects if name.startswith("anchors/")] or ["x"]), b"x" * 99)
    bad = bytearray(raw)
    bad[-1 - rng.randrange(min(90, len(bad)))] ^= 1
    import hashlib

    name = f"anchors/{end.step:08d}-{rng.randrange(1 << 48):012x}/model.safetensors"
    objects[name] = bytes(bad)
    file = File(name, len(bad), hashlib.sha256(bad).hexdigest())
    start = rng.choice((None, *(link for link in links if link.step < end.step)))
    edge = Edge(by.identity, start, end, (file,), "mallory", 0)
    objects[edge.name] = edge.encode()
    link = Link(end.step, edge.name[-69:-5])
    said = Statement(by.identity, None, link, None, 1 << 52)
    by.put(objects, statement(key, said, key=rng.choice((None, by.signer))))
    for one in by.statements(objects):
        if one.statement.ref is None and rng.random() < 0.5:
            by.put(objects, replace(one, statement=replace(one.statement, link=link)))


def flood(by: Attacker, rng: random.Random, objects: Objects, key: PrivateKey) -> None:
    """Rubbish where signatures are looked for, some of it by name newer than all others."""
    for link in by.links(objects):
        folder = f"signatures/{link.step:08d}-{link.id}/"
        for _ in range(rng.randrange(4)):
            name = f"{folder}{rng.choice((by.signer[:16], key.public[:16]))}-{rng.randrange(10**16):016d}.json"
            objects[name] = rng.randbytes(rng.randrange(200))


ATTACKS: tuple[Callable[[Attacker, random.Random, Objects, PrivateKey], None], ...] = (
    old_branch,
    old_branch_said_anew,
    old_store,
    forged_step,
    forged_and_signed,
    borrowed_signature,
    other_branch,
    other_repository,
    own_keys,
    less,
    flipped,
    swapped,
    retold,
    false_way,
    flood,
)
