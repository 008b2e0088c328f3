"""The commands of keys, and the options of those who trust, in real processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.running import Done, World, deltackpt

pytest.importorskip("cryptography")


class Desk:
    """A folder of keys, a repository of its own, and what is remembered."""

    def __init__(self, root: Path, world: World) -> None:
        self.root, self.steps, self.repo = root, world.steps, root / "repo"
        for name in ("a", "b"):
            assert self("keygen", root / name).status == 0

    def __call__(self, *args: object, memory: str = "memory", **more: str) -> Done:
        return deltackpt(*args, DELTACKPT_TRUST_DIR=str(self.root / memory), **more)

    def write(self, step: int, *options: object, **more: str) -> Done:
        return self("write", self.steps[step], self.repo, *options, **more)


@pytest.fixture
def desk(tmp_path: Path, world: World) -> Desk:
    return Desk(tmp_path, world)


@pytest.mark.parametrize("key", ["", "/", "."])
def test_a_key_has_a_name(desk: Desk, key: str) -> None:
    done = desk("keygen", key)
    assert done.status == 2
    assert "error: KEY: found" in done.err


def test_a_comment_of_any_bytes(desk: Desk) -> None:
    """No private key is left of which nobody was told."""
    made = desk("keygen", desk.root / "d", "--comment", "J\udcffrg", "--json").json
    assert made["key"].endswith(" J?rg")
    assert (desk.root / "d.pub").read_text() == f"{made['key']}\n"


def test_from_a_key_to_a_step(desk: Desk) -> None:
    made = desk("keygen", desk.root / "c", "--comment", "me and\nyou", "--json").json
    assert made["key"].startswith("ssh-ed25519 ")
    assert made["key"].endswith(" me and you")
    assert (desk.root / "c").stat().st_mode & 0o777 == 0o600
    again = desk("keygen", desk.root / "c")
    assert again.status == 7
    assert "output-exists" not in again.out
    assert desk.write(0, "--sign", desk.root / "a").status == 0
    text = (desk.root / "a").read_text()
    done = desk.write(1, DELTACKPT_SIGN_KEY=text)  # the key itself
    assert done.status == 0, done.err
    assert text.splitlines()[2] not in done.out + done.err
    pub = desk.root / "a.pub"
    for how in (("--trust", pub), ("--trust", pub.read_text().strip()), ("--trust", pub, "--max-age", "1h")):
        shutil.rmtree(desk.root / "out", ignore_errors=True)
        assert desk("apply", desk.repo, desk.root / "out", *how).status == 0
    shutil.rmtree(desk.root / "out")
    refused = desk("apply", desk.repo, desk.root / "out", "--json", DELTACKPT_TRUST=str(desk.root / "b.pub"))
    assert (refused.status, refused.json["error"]) == (4, "signature-missing")
    assert not (desk.root / "out").exists()
    assert desk("verify", desk.repo, "--trust", pub).status == 0
    assert desk("verify", desk.repo, "--trust", desk.root / "b.pub", memory="b").status == 4
    for command in (("follow", desk.repo, desk.root / "cache", "--once"), ("mirror", desk.repo, desk.root / "copy")):
        assert desk(*command, "--trust", desk.root / "b.pub", memory="b").status == 4
        assert desk(*command, "--trust", pub).status == 0
    assert desk("apply", desk.root / "copy", desk.root / "out", "--trust", pub, memory="c").status == 0


def test_steps_that_are_signed_later(desk: Desk) -> None:
    assert desk.write(0).status == 0
    assert desk.write(1).status == 0
    pub = desk.root / "a.pub"
    stale = desk("apply", desk.repo, desk.root / "out", "--trust", pub)
    assert stale.status == 4
    assert "deltackpt sign" in stale.err
    assert desk("sign", desk.repo).status == 2
    done = desk("sign", desk.repo, "--all", "--sign", desk.root / "a", "--json")
    assert [(one["name"], one["step"]) for one in done.json["signed"]] == [("refs/main", 1), (None, 0)]
    assert desk("tag", desk.repo, "best", "0", "--sign", desk.root / "a").status == 0
    for step in ("latest", "0", "best"):
        assert desk("apply", desk.repo, desk.root / f"out-{step}", "--step", step, "--trust", pub).status == 0
    assert desk("sign", desk.repo, "0", "--all", "--sign", desk.root / "a").status == 2
    assert desk("sign", desk.repo, "7", "--sign", desk.root / "a").status == 6


def test_key_sets(desk: Desk) -> None:
    assert desk.write(0, "--sign", desk.root / "a").status == 0
    assert desk("keys", desk.repo).status == 6
    both = desk.root / "both"
    both.write_text("threshold 2\n" + (desk.root / "a.pub").read_text() + (desk.root / "b.pub").read_text())
    assert desk("keys", desk.repo, "--set", both, "--sign", desk.root / "a").status == 4
    done = desk("keys", desk.repo, "--set", both, "--sign", desk.root / "a", "--sign", desk.root / "b")
    assert done.status == 0, done.err
    shown = desk("keys", desk.repo)
    (desk.root / "KEYS").write_text(shown.out)
    assert shown.out.splitlines()[1:3] == ["number 1", "threshold 2"]
    refused = desk("apply", desk.repo, desk.root / "out", "--trust", desk.root / "a.pub")
    assert refused.status == 4
    assert "expected 2" in refused.err
    assert desk("sign", desk.repo, "--sign", desk.root / "b").status == 0
    for keys in ("a.pub", "KEYS"):
        assert desk("apply", desk.repo, desk.root / f"out-{keys}", "--trust", desk.root / keys).status == 0


def test_first_use_is_told(desk: Desk) -> None:
    assert desk.write(0, "--sign", desk.root / "a").status == 0
    done = desk("apply", desk.repo, desk.root / "out", "--trust", "first-use")
    assert done.status == 0
    assert "trusted on first use" in done.err
    assert "SHA256:" in done.err
    assert desk.write(1, "--sign", desk.root / "b", memory="other").status == 0
    assert desk("apply", desk.repo, desk.root / "no", "--trust", "first-use").status == 4


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--trust", "no-such-file"), "trust-file"),
        (("--trust", ""), "trust-file"),
        (("--max-age", "1h"), "usage"),
        (("--trust", "first-use", "--max-age", "soon"), "usage"),
        (("--trust", "first-use", "--max-age", "0"), "usage"),
    ],
)
def test_options_that_mean_nothing(desk: Desk, options: tuple[str, ...], code: str) -> None:
    desk.write(0)
    done = desk("apply", desk.repo, desk.root / "out", *options, "--json")
    assert (done.status, done.json["error"]) == (2, code)


def test_a_private_key_is_no_argument_and_in_no_message(desk: Desk) -> None:
    text = (desk.root / "a").read_text()
    secret = "".join(text.split("-----")[2].split())[120:180]
    for done in (
        desk.write(0, "--sign", text, "--verbose"),
        desk.write(0, "--sign", desk.root / "a.pub", "--verbose"),
        desk.write(0, "--trust", desk.root / "a", "--verbose"),
        desk.write(0, "--verbose", DELTACKPT_SIGN_KEY=text.replace("b3Bl", "b3Bx", 1)),
        desk("sign", desk.repo, "--verbose", "--json", DELTACKPT_SIGN_KEY=text[:-60]),
        desk("watch", desk.root, desk.repo, "--once", "--sign", text, "--verbose"),
        desk("gc", desk.repo, "--rebase", "--sign", text, "--verbose"),
    ):
        assert done.status in (2, 6)
        squeezed = "".join((done.out + done.err).replace("\\n", "").split())
        assert secret not in squeezed
        assert json.dumps(secret)[1:-1] not in squeezed
    assert not desk.repo.exists() or not list(desk.repo.glob("refs/*"))


def named(desk: Desk, repo: Path) -> set[str]:
    """The ids of the records, manifests and edges, that ``repo`` holds a signature of."""
    return {path.parent.name.partition("-")[2] for path in (repo / "signatures").glob("*/*.json")}


def test_a_watch_signs_what_it_publishes(desk: Desk) -> None:
    """By the option alone; and, told whom to trust, it goes on from no step that nobody signed."""
    saved, pub = desk.root / "saved", desk.root / "a.pub"
    shutil.copytree(desk.steps[0], saved / "step_0")
    line = ("watch", saved, desk.repo, "--once", "--settle", "0s", "--sign", desk.root / "a", "--trust", pub)
    assert desk(*line).status == 0
    shutil.copytree(desk.steps[1], saved / "step_1")
    assert desk(*line).status == 0
    assert len(named(desk, desk.repo)) == 2
    assert desk("apply", desk.repo, desk.root / "out", "--trust", pub, memory="reader").status == 0
    assert desk.write(2, memory="other").status == 0  # somebody who writes to the store
    shutil.copytree(desk.steps[2], saved / "step_3")
    refused = desk(*line, "--json")
    assert (refused.status, refused.json["error"]) == (4, "signature-missing")


def test_an_import_signs_what_it_publishes(desk: Desk, world: World) -> None:
    """Whole steps and changes alike."""
    out, pub = desk.root / "slime", desk.root / "a.pub"
    assert desk("export", world.repo, "slime", out, "--to", 1).status == 0
    line = ("import", "auto", out, desk.repo, "--sign", desk.root / "a", "--trust", pub)
    assert desk(*line).status == 0
    assert desk("export", world.repo, "slime", out, "--from", 1, "--deltas-only").status == 0
    done = desk(*line, "--json")
    assert (done.status, done.json["steps"]) == (0, [2])
    assert len(named(desk, desk.repo)) == 3
    for step in ("0", "latest"):
        to = ("--step", step, "--trust", pub)
        assert desk("apply", desk.repo, desk.root / f"out-{step}", *to, memory="reader").status == 0
    assert desk(*line[:4], "--sign", desk.root / "a", "--trust", desk.root / "b.pub", memory="b").status == 4


def test_a_rebase_signs_its_anchors(desk: Desk) -> None:
    """Of what is kept, a reader that asks for signatures has nothing but this anchor to begin with."""
    sign = ("--sign", desk.root / "a")
    for i in range(8):  # far apart, so that the patches weigh more than an anchor
        done = desk("write", desk.steps[i % 2 * 3], desk.repo, "--anchor-when-ratio", 1e9, *sign)
        assert done.status == 0, done.err
    assert desk("tag", desk.repo, "kept", *sign).status == 0
    assert desk("write", desk.steps[1], desk.repo, "--anchor", *sign).status == 0
    pub = desk.root / "a.pub"
    keep = ("gc", desk.repo, "--keep-last", 1, "--grace", 0)
    odd = desk(*keep, *sign, "--json")
    assert (odd.status, odd.json["error"]) == (2, "usage")
    done = desk(*keep, "--rebase", *sign, "--trust", pub, "--json")
    assert done.status == 0, done.err
    assert done.json["result"]["removed"]["steps"]
    edges = {path.stem.rpartition("-")[2] for path in (desk.repo / "edges").glob("*.json")}
    assert edges
    assert edges <= named(desk, desk.repo)
    taken = desk("apply", desk.repo, desk.root / "out", "--step", "kept", "--trust", pub, memory="reader")
    assert taken.status == 0, taken.err
    assert desk(*keep, "--trust", desk.root / "b.pub", memory="b").status == 4
