"""Every way to read a repository asks for signatures alike: what one refuses all refuse, by option and by environment,
and leave nothing behind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deltackpt_cli.app import run
from support.chains import World
from support.fake_sglang import FakeSglang
from support.signed import keys_of, statement
from support.states import tree

from deltackpt.engines.own_steps import OwnSteps
from deltackpt.errors import ChainError, DeltackptError
from deltackpt.format.manifest import Link
from deltackpt.format.signature import KeySet, SignedKeySet, Statement
from deltackpt.repository import Repository
from deltackpt.repository.sign_records import publish_keys
from deltackpt.repository.signatures import put_signature
from deltackpt.signing.keys import PrivateKey
from deltackpt.signing.openssh import public_line

ONE, TWO, THREE, THIEF = (PrivateKey.generate() for _ in range(4))
OK = ""


@dataclass
class Place:
    """A repository in a folder; ``trust``: what its readers are told, a file of keys or `first-use`; ``now`` in
    microseconds is when the next statement is signed."""

    root: Path
    world: World = field(init=False)
    trust: str = ""
    max_age: str = ""
    now: int = field(default_factory=lambda: time.time_ns() // 1000 - 10**9)

    def __post_init__(self) -> None:
        self.root.mkdir()
        self.world = World(self.root)

    @property
    def repo(self) -> Path:
        return self.root / "repo"

    def publish(self, *keys: PrivateKey) -> Link:
        """The next step, signed by all of these."""
        links = self.world.run(1)
        self.sign(links[-1], *keys)
        return links[-1]

    def sign(self, link: Link, *keys: PrivateKey) -> None:
        self.now += 1000
        said = Statement(self.world.repo.id, "refs/main", link, self.world.repo.load(link).parent, self.now)
        for key in keys:
            put_signature(self.world.repo.store, statement(key, said))

    def trusts(self, *keys: PrivateKey, lines: str = "") -> None:
        self.trust = str(self.root / "KEYS")
        Path(self.trust).write_text(lines + "".join(f"{public_line(key.public)}\n" for key in keys))

    def as_it_is(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.repo.rglob("*") if path.is_file()}

    def put_back(self, then: dict[Path, bytes]) -> None:
        for path in self.as_it_is().keys() - then.keys():
            path.unlink()
        for path, data in then.items():
            path.write_bytes(data)


Scene = Callable[[Place], Any]
SCENES: dict[str, tuple[Scene, str]] = {}


def scene(code: str) -> Callable[[Scene], Scene]:
    """What a reader of the place has to say; a scene that yields is read, taken, at its `yield` first."""

    def keep(made: Scene) -> Scene:
        SCENES[made.__name__] = made, code
        return made

    return keep


@scene(OK)
def signed(place: Place) -> None:
    place.publish(ONE)
    place.publish(ONE)
    place.trusts(ONE)


@scene(OK)
def two_of_three(place: Place) -> None:
    place.publish(ONE, THREE)
    place.publish(THREE, TWO, THIEF)
    place.trusts(ONE, TWO, THREE, lines="threshold 2\n")


@scene("signature-missing")
def one_of_three(place: Place) -> None:
    place.publish(ONE, TWO)
    place.publish(THREE, THIEF)
    place.trusts(ONE, TWO, THREE, lines="threshold 2\n")


@scene("signature-missing")
def unsigned(place: Place) -> None:
    place.publish(ONE)
    place.publish()
    place.trusts(ONE)


@scene("signature-missing")
def of_a_thief(place: Place) -> None:
    place.publish(ONE)
    place.publish(THIEF)
    place.trusts(ONE)


@scene(OK)
def rotated(place: Place) -> None:
    place.publish(ONE)
    publish_keys(place.world.repo, keys_of(ONE, TWO), [ONE])
    place.sign(place.world.repo.find("latest"), TWO)  # what has to stay readable
    publish_keys(place.world.repo, keys_of(TWO), [TWO])
    place.publish(TWO)
    place.trusts(ONE)


@scene("signature-missing")
def revoked(place: Place) -> None:
    place.publish(ONE)
    publish_keys(place.world.repo, keys_of(TWO), [ONE, TWO])
    place.publish(ONE)
    place.trusts(ONE)


@scene("keys-wrong")
def keys_of_a_thief(place: Place) -> None:
    place.publish(ONE)
    new = KeySet(place.world.repo.id, 1, (THIEF.public,))
    place.world.repo.store.put(new.name, [SignedKeySet(new, (THIEF(new.encode()),)).encode()])
    place.publish(THIEF)
    place.trusts(ONE)


@scene("keys-expired")
def expired(place: Place) -> None:
    place.publish(ONE)
    place.trusts(ONE, lines="expires 2020-01-01\n")


@scene("repository-replaced")
def keys_for_another(place: Place) -> None:
    place.publish(ONE)
    place.trusts(ONE, lines=f"repository {'ab' * 16}\n")


@scene(OK)
def young(place: Place) -> None:
    place.publish(ONE)
    place.trusts(ONE)
    place.max_age = "2000"


@scene("signature-stale")
def old(place: Place) -> None:
    place.publish(ONE)
    place.trusts(ONE)
    place.max_age = "500"


@scene(OK)
def first_use(place: Place) -> None:
    place.publish(ONE)
    place.trust = "first-use"


@scene("first-use-unclear")
def first_use_of_many(place: Place) -> None:
    place.publish(ONE, TWO)
    place.trust = "first-use"


@scene("signature-missing")
def another_after_first_use(place: Place) -> Any:
    place.publish(ONE)
    place.trust = "first-use"
    yield
    place.publish(THIEF)


@scene("signature-replayed")
def put_back(place: Place) -> Any:
    place.publish(ONE)
    then = place.as_it_is()
    place.publish(ONE)
    place.trusts(ONE)
    yield
    place.put_back(then)


@scene("rewind-unsigned")
def gone_on_from_what_was_put_back(place: Place) -> Any:
    yield from put_back(place)
    place.publish(ONE)
    place.publish(ONE)


def _code(status: int, out: str) -> str:
    if status == 0:
        return OK
    said = json.loads(out.strip().splitlines()[-1])
    return str(said["error"] if "error" in said else said["findings"][0]["code"])


class Readers:
    """Each reads the place as one who trusts as it says, and returns the code of the error, or `OK`."""

    def __init__(self, place: Place, options: bool, capsys: pytest.CaptureFixture[str], out: Path) -> None:
        self.place, self.options, self.capsys, self.out = place, options, capsys, out

    def command(self, name: str, *words: object, given: bool = True) -> str:
        trust = ["--trust", self.place.trust] if self.options and given else []
        age = ["--max-age", f"{self.place.max_age}s"] if trust and self.place.max_age else []
        self.capsys.readouterr()
        status = run([name, *map(str, words), *trust, *(age if name not in ("write", "gc") else []), "--json"])
        return _code(status, self.capsys.readouterr().out)

    def target(self) -> Path:
        return self.out / str(len(list(self.out.glob("*"))))

    def apply(self) -> str:
        return self.command("apply", self.place.repo, self.target())

    def apply_cache(self) -> str:
        return self.command("apply", self.place.repo, self.out / "cache", "--cache")

    def apply_tensor(self) -> str:
        return self.command("apply", self.place.repo, self.target(), "--tensor", "w*")

    def follow(self) -> str:
        return self.command("follow", self.place.repo, self.out / "followed", "--once")

    def mirror(self) -> str:
        return self.command("mirror", self.place.repo, self.out / "copy")

    def verify(self) -> str:
        return self.command("verify", self.place.repo)

    def serve_updates(self) -> str:
        fake = FakeSglang()
        try:
            return self.command("serve-updates", self.place.repo, self.out / "served", "--engine", fake.spec, "--once")
        finally:
            fake.close()

    def serve_adapters(self) -> str:
        fake = FakeSglang()
        words = ("--engine", fake.spec, "--adapter", "a", "--once")
        try:
            found = self.command("serve-adapters", self.place.repo, self.target(), *words)
            return OK if found == "adapter-missing" else found  # the step is restored, and is no adapter
        finally:
            fake.close()

    def pull(self) -> str:
        return self.command("pull", self.out / "pulled", self.place.repo)

    def write(self) -> str:
        """Goes on from the newest step, in a copy of the store."""
        return self.elsewhere("write", self.place.root / "in")

    def gc(self) -> str:
        return self.elsewhere("gc")

    def elsewhere(self, name: str, *words: Path) -> str:
        before = self.place.as_it_is()
        try:
            found = self.command(name, *words, self.place.repo)
            assert found == OK or self.place.as_it_is() == before
            return found
        finally:
            self.place.put_back(before)

    def secured(self) -> Repository:
        repo = Repository.open(self.place.repo)
        if not self.options:
            return repo.secure()
        return repo.secure(self.place.trust, max_age=float(self.place.max_age) if self.place.max_age else None)

    def module(self) -> str:
        torch = pytest.importorskip("torch")
        from deltackpt.engines.transformers import refresh

        with pytest.raises(DeltackptError) as error:  # the model is another one, which is found later
            refresh(torch.nn.Linear(2, 2), self.secured())
        return OK if error.value.code == "model-differs" else error.value.code

    def resume(self) -> str:
        torch = pytest.importorskip("torch")
        from deltackpt.hooks import TrainerHook
        from deltackpt.signing.policy import trust_policy

        before, age = self.place.as_it_is(), float(self.place.max_age) if self.place.max_age else None
        trust = trust_policy(self.place.trust, age) if self.options else None
        try:
            with TrainerHook(torch.nn.Linear(2, 2), self.place.repo, trust=trust, resume="anchor") as hook:
                hook.step(9)
        except ChainError as error:
            assert self.place.as_it_is() == before
            return error.code
        finally:
            self.place.put_back(before)
        return OK

    def engine(self) -> str:
        """An engine without a cache reads the step that it is told itself, by what its environment trusts."""
        try:
            head = Repository.open(self.place.repo).unproven("refs/main")
            assert head is not None
            with OwnSteps.open(str(self.place.repo), trusted=True).folder(head.link) as folder:
                assert tree(folder) == self.place.world.trees[head.link.id]
        except ChainError as error:
            return error.code
        return OK

    def by_environment(self, name: str, *words: object) -> str:
        return self.command(name, self.place.repo, *words, given=False)


BY_OPTION = (
    "apply", "apply_cache", "apply_tensor", "follow", "mirror", "verify", "serve_updates", "serve_adapters", "pull",
    "write", "gc", "module", "resume",
)  # fmt: skip
BY_ENVIRONMENT: dict[str, tuple[object, ...]] = {"log": (), "inspect": (), "report": ("--text",), "status": ()}


def _read(readers: Readers, name: str) -> str:
    if name in BY_ENVIRONMENT:
        return readers.by_environment(name, *BY_ENVIRONMENT[name])
    return str(getattr(readers, name)())


FEW = ("signed", "unsigned", "put_back", "keys_for_another")  # the environment is read in one place
CASES = [pytest.param(what, True, id=f"{what}-options") for what in SCENES] + [
    pytest.param(what, False, id=f"{what}-environment", marks=[] if what in FEW else [pytest.mark.heavy])
    for what in SCENES
]


@pytest.mark.parametrize(("what", "options"), CASES)
def test_all_of_them_agree(
    what: str, options: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, code = SCENES[what]
    place = Place(tmp_path / "place")
    playing = made(place)
    next(playing, None) if playing is not None else None
    if not options:
        monkeypatch.setenv("DELTACKPT_TRUST", place.trust)
        monkeypatch.setenv("DELTACKPT_MAX_AGE", place.max_age)
    named = code in ("signature-replayed", "signature-stale", "rewind-unsigned")  # what a step alone does not tell
    names = BY_OPTION if options else (*BY_OPTION, *BY_ENVIRONMENT, *(() if named else ("engine",)))
    found = {}
    for name in names:  # each remembers apart: none is warned by another
        monkeypatch.setenv("DELTACKPT_TRUST_DIR", str(tmp_path / "memories" / name))
        readers = Readers(place, options, capsys, tmp_path / f"out-{name}")
        if playing is not None:
            assert _read(readers, name) == OK, name
    if playing is not None:
        with monkeypatch.context() as owner:
            for name in ("DELTACKPT_TRUST", "DELTACKPT_MAX_AGE"):
                owner.delenv(name, raising=False)
            next(playing, None)
    for name in names:
        monkeypatch.setenv("DELTACKPT_TRUST_DIR", str(tmp_path / "memories" / name))
        found[name] = _read(Readers(place, options, capsys, tmp_path / f"out-{name}"), name)
    aged = ("write", "gc") if options and place.max_age else ()  # which have no --max-age
    assert {name: said for name, said in found.items() if name not in aged and said != code} == {}
