"""The repository: its marker, its refs, and manifests that are only taken for what their hash says."""

import hashlib
from dataclasses import replace
from uuid import uuid4

import pytest
from support.faulty_store import FaultyStore
from support.states import make_checkpoint

from deltackpt.errors import ChainError, ConflictError, DeltackptError, FormatError, NotFoundError, UsageError
from deltackpt.format.canonical import dumps, loads_strict
from deltackpt.format.manifest import Link, decode
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository
from deltackpt.repository import repository as repository_module
from deltackpt.repository.marker import MARKER
from deltackpt.store import open_store

NEVER = AnchorPolicy(ratio=float("inf"))


@pytest.fixture
def url(tmp_path):
    """A repository of three steps."""
    url = f"memory://{uuid4().hex}"
    for i in range(3):
        path = make_checkpoint(tmp_path / str(i), {"x": ("I64", (64,), bytes([i]) * 512)}, side={"config.json": b"{}"})
        write(path, url, anchor=NEVER, threads=1)
    return url


def code(kind: type[DeltackptError], call) -> str:
    with pytest.raises(kind) as error:
        call()
    return error.value.code


def publish(repo: Repository, raw: bytes, step: int) -> Link:
    """Put the bytes of a manifest, whatever they are, and move the ref there."""
    link = Link(step, hashlib.sha256(raw).hexdigest())
    repo.store.put(link.name, [raw])
    repo.move_ref("main", repo.ref(), link)
    return link


# Open and create


def test_open_and_create():
    url = f"memory://{uuid4().hex}"
    assert code(NotFoundError, lambda: Repository.open(url)) == "repository-missing"
    made = Repository.open_or_create(url)
    assert (made.ref(), made.steps(), made.log()) == (None, [], [])
    assert Repository.open(url).id == Repository.open_or_create(url).id == made.id
    assert Repository.open_or_create(f"memory://{uuid4().hex}").id != made.id
    assert [o.name for o in open_store(url).list("")] == [MARKER]


def test_a_place_with_other_things_in_it():
    url = f"memory://{uuid4().hex}"
    open_store(url).put("something", [b"x"])
    assert code(ConflictError, lambda: Repository.open_or_create(url)) == "not-a-repository"


def test_somebody_makes_it_at_the_same_moment(monkeypatch):
    url = f"memory://{uuid4().hex}"
    inner = open_store(url)

    class Racing(FaultyStore):
        def put(self, name, chunks):
            made.append(Repository.open_or_create(url).id)
            return super().put(name, chunks)

    made: list[str] = []
    stores = [Racing(inner), inner]
    monkeypatch.setattr(repository_module, "open_store", lambda url: stores.pop(0))
    assert Repository.open_or_create(url).id == made[0]


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        (b"", "json-syntax"),
        (b"[]", "marker-field"),
        (b'{"format":"other"}', "marker-field"),
        (b'{"format":"deltackpt","version":1}', "marker-field"),
        (b'{"format":"deltackpt","repository":"abababababababababababababababab","version":2}', "version-unknown"),
        (b" " * (1 << 17), "object-too-large"),
    ],
)
def test_a_broken_marker(marker, expected):
    url = f"memory://{uuid4().hex}"
    open_store(url).put(MARKER, [marker])
    assert code(FormatError, lambda: Repository.open(url)) == expected


# Steps


def test_steps_and_their_names(url):
    repo = Repository.open(url)
    log = repo.log()
    assert [m.step for m in log] == [2, 1, 0]
    assert repo.steps() == [m.link for m in reversed(log)]
    assert repo.find() == repo.find("latest") == repo.find(2) == repo.find("2") == repo.ref().link == log[0].link
    assert repo.find(0) == log[2].link
    for number in (3, 10**9, -1):
        assert code(NotFoundError, lambda n=number: repo.find(n)) == "step-missing"
    assert code(NotFoundError, lambda: repo.find("no-such-tag")) == "step-missing"
    assert code(NotFoundError, lambda: repo.find("latest", ref="other")) == "ref-missing"


def test_a_step_beyond_a_hole(url):
    """A number that only one step has is that step, where the chain ends at a manifest that is gone."""
    links = [m.link for m in Repository.open(url).log()]
    store = open_store(url)
    store.delete(links[1].name)
    repo = Repository.open(url)
    assert repo.find(0) == links[2]
    other = f"steps/00000000-{'0' * 64}.json"
    store.put(other, [b"{}"])
    assert code(ConflictError, lambda: Repository.open(url).find(0)) == "step-ambiguous"
    for name in (other, links[2].name):
        store.delete(name)
    assert code(NotFoundError, lambda: Repository.open(url).find(0)) == "step-missing"


@pytest.mark.parametrize("spec", ["²", "٣", "", " 1", "-1", "1.0", "0x1", "../refs/main", "x" * 200])
def test_what_is_no_name_of_a_step(url, spec):
    with pytest.raises(DeltackptError) as error:
        Repository.open(url).find(spec)
    assert error.value.exit_code in (2, 6)


def test_a_step_between_two_names_both(tmp_path):
    url = f"memory://{uuid4().hex}"
    for step in (10, 20):
        write(make_checkpoint(tmp_path / str(step), {"x": ("U8", (1,), b"a")}), url, step=step)
    with pytest.raises(NotFoundError) as error:
        Repository.open(url).find(15)
    assert "10" in error.value.hint
    assert "20" in error.value.hint
    assert error.value.exit_code == 6


def test_refs(url):
    repo = Repository.open(url)
    head = repo.ref()
    assert [r.name for r in repo.refs()] == ["main"]
    repo.move_ref("side-1", None, Link(0, repo.log()[2].link.id))
    assert [r.name for r in repo.refs()] == ["main", "side-1"]
    assert [m.step for m in repo.log("side-1")] == [0]
    assert code(ConflictError, lambda: repo.move_ref("main", None, repo.find(0))) == "ref-moved"
    stale = replace(head, raw=b"something else")
    assert code(ConflictError, lambda: repo.move_ref("main", stale, repo.find(0))) == "ref-moved"
    assert repo.ref() == head
    for name in ("", "a/b", "..", "é", "-x"):
        assert code(UsageError, lambda n=name: repo.ref(n)) == "ref-name"


@pytest.mark.parametrize(
    "raw",
    [b"", b"{}", b"null", b'{"id":"ab","step":1}', b'{"id":"%s","step":-1}' % (b"a" * 64), b"x" * (1 << 17)],
    ids=range(6),
)
def test_a_broken_ref(url, raw):
    repo = Repository.open(url)
    repo.store.swap("refs/main.json", repo.ref().raw, raw)
    code(FormatError, repo.ref)


# Manifests that are not what they should be


def test_a_manifest_is_what_its_hash_says(url):
    repo = Repository.open(url)
    for link in repo.steps():
        raw = repo.store.get(link.name, 1 << 20)
        assert hashlib.sha256(raw).hexdigest() == link.id
        assert decode(raw, "here").encode() == raw
        for at in range(0, len(raw), 37):
            flipped = Repository(FaultyStore(repo.store, flip={link.name: at}), repo.id)
            assert code(FormatError, lambda f=flipped, one=link: f.load(one)) == "manifest-hash"
        short = Repository(FaultyStore(repo.store, short={link.name: len(raw) - 1}), repo.id)
        assert code(FormatError, lambda s=short, one=link: s.load(one)) == "manifest-hash"


def edited(repo: Repository, **fields) -> bytes:
    value = loads_strict(repo.store.get(repo.find().name, 1 << 20), limit=1 << 20, where="here")
    value.update(fields)
    return dumps({k: v for k, v in value.items() if v is not ...})


def test_fields_that_are_not_known_are_kept_or_refused(url):
    repo = Repository.open(url)
    kept = publish(repo, edited(repo, later={"a": [1]}), 2)
    assert repo.load(kept).extra == {"later": {"a": [1]}}
    assert repo.load(kept).link == kept
    refusals = {
        "version-unknown": {"version": 2},
        "feature-unknown": {"requires": ["time-travel"]},
        "manifest-field": {"format": "other"},
        "name-escapes": {"layout": {"name": "anchors/../../x", "size": 1, "sha256": "0" * 64}},
    }
    for expected, fields in refusals.items():
        link = publish(repo, edited(repo, **fields), 2)
        assert code(FormatError, lambda one=link: repo.load(one)) == expected
        repo.move_ref("main", repo.ref(), kept)


@pytest.mark.parametrize(
    "fields",
    [
        {"parent": ...},
        {"parent": None},
        {"base": None},
        {"parent": {"step": 2, "id": "0" * 64}},
        {"patch": None, "anchor": None},
        {"patch": {}},
        {"state": "xyz"},
        {"step": True},
        {"step": -1},
        {"counts": {}},
        {"time": "now"},
        {"digests": {"name": "states/x", "size": -1, "sha256": "0" * 64}},
        {"digests": {"name": "states/x", "size": 1, "sha256": "0" * 63}},
        {"digests": {"name": "states/x", "size": 1, "sha256": "0" * 64, "more": 1}},
        {"metadata": []},
        {"producer": 1},
    ],
    ids=str,
)
def test_fields_of_other_types(url, fields):
    repo = Repository.open(url)
    link = publish(repo, edited(repo, **fields), 2)
    assert code(FormatError, lambda: repo.load(link)) == "manifest-field"


def test_json_in_another_form(url):
    repo = Repository.open(url)
    raw = repo.store.get(repo.find().name, 1 << 20)
    for other in (raw + b"\n", raw.replace(b":", b": ", 1), b"{" + raw[1:-1] + b',"a":1}'):
        link = publish(repo, other, 2)
        assert code(FormatError, lambda one=link: repo.load(one)) == "manifest-canonical"


@pytest.mark.parametrize(
    "name",
    [
        *["", "/x", "deltackpt.json", "refs/main.json", "steps/x", "anchors", "anchors/", "anchors//x", "anchors/./x"],
        *[
            "anchors/../x",
            "anchors/..",
            "anchors/a\\b",
            "anchors/a:b",
            "anchors/a\0b",
            "anchors/.lock",
            "anchors/.tmp-1",
        ],
        "anchors/" + "x" * 1024,
    ],
)
def test_names_that_leave_their_folders(url, name):
    repo = Repository.open(url)
    link = publish(repo, edited(repo, layout={"name": name, "size": 1, "sha256": "0" * 64}), 2)
    assert code(FormatError, lambda: repo.load(link)) == "name-escapes"


def test_a_manifest_of_another_repository_or_step(url, tmp_path):
    repo, other = Repository.open(url), Repository.open_or_create(f"memory://{uuid4().hex}")
    raw = repo.store.get(repo.find(0).name, 1 << 20)
    copied = publish(other, raw, 0)
    assert code(ChainError, lambda: other.load(copied)) == "manifest-elsewhere"
    renamed = publish(repo, raw, 7)
    assert code(ChainError, lambda: repo.load(renamed)) == "manifest-elsewhere"


# Objects


def test_objects_are_what_their_hash_says(url):
    repo = Repository.open(url)
    step = repo.load(repo.find())
    for file, call in ((step.layout, repo.layout), (step.digests, repo.digests)):
        for at in (0, file.size // 2, file.size - 1):
            flipped = Repository(FaultyStore(repo.store, flip={file.name: at}), repo.id)
            call_flipped = getattr(flipped, call.__name__)
            assert code(FormatError, lambda c=call_flipped: c(step)) == "object-hash"
        short = Repository(FaultyStore(repo.store, short={file.name: file.size - 1}), repo.id)
        assert code(FormatError, lambda s=short, n=call.__name__: getattr(s, n)(step)) == "object-hash"


def test_digests_prove_the_state_of_the_manifest(url):
    repo = Repository.open(url)
    assert set(repo.digests(repo.load(repo.find()))) == {"x"}
    link = publish(repo, edited(repo, state="7" * 64), 2)
    assert code(FormatError, lambda: repo.digests(repo.load(link))) == "state-differs"
    older = repo.load(repo.find(1)).digests.to_dict()
    link = publish(repo, edited(repo, digests=older), 2)
    assert code(FormatError, lambda: repo.digests(repo.load(link))) == "state-differs"


def test_publish_puts_the_manifest_before_it_moves_the_ref(url):
    repo = Repository.open(url)
    watched = Repository(FaultyStore(repo.store), repo.id)
    new = replace(repo.load(repo.find()), step=3, time=0)
    assert watched.publish(new, "main", repo.ref()) == new.link == repo.find()
    assert watched.store.changes == [("put", new.link.name), ("swap", "refs/main.json")]
