"""What goes wrong: where, have, need, hint on stderr; the same as JSON on stdout; a status for scripts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from deltackpt_cli import format as text
from support.running import ROOT, World, command, deltackpt, environment, files, interrupted, masked

FIELDS = {"error", "exit_code", "where", "have", "need", "hint"}


def test_1_a_bug_keeps_its_traceback(world: World) -> None:
    broken = (
        "import deltackpt.report.log as m\ndef boom(*a, **k): raise RuntimeError('[red]b[/red]\\x1b[31m')\nm.log = boom"
    )
    done = deltackpt("log", world.repo, "--json", before=broken)
    assert (done.status, done.json["error"], done.json["exit_code"]) == (1, "bug", 1)
    assert done.err.startswith("Traceback (most recent call last):\n")
    assert "found RuntimeError: [red]b[/red]\\x1b[31m, expected" in done.err
    assert "\x1b" not in done.out + done.err


def test_no_secret_is_printed(world: World, tmp_path: Path) -> None:
    """Not even by a bug in a library that knows them all."""
    words = {"HF_TOKEN": "hf_hunter2hunter2", "AWS_SECRET_ACCESS_KEY": "hunter2/hunter2+hunter2"}
    words |= {"AZURE_STORAGE_CONNECTION_STRING": "AccountKey=hunter2hunter2==;"}
    said = " ".join(words.values()) + " https://me:hunter2@host/x?X-Amz-Signature=hunter2&b=1 Bearer hunter2"
    broken = f"import deltackpt.report.log as m\ndef boom(*a, **k):\n  raise RuntimeError({said!r})\nm.log = boom"
    for options in ([], ["--json"], ["--verbose"], ["--json", "--verbose"]):
        done = deltackpt("log", world.repo, *options, before=broken, **words)
        assert done.status == 1
        assert "hunter2" not in done.out + done.err, options
        assert "https://***@host/x?X-Amz-Signature=***&b=1 Bearer ***" in done.err
    for url in ("s3://me:hunter2@bucket/x", "s3://bucket/x?token=hunter2", "s4://me:hunter2@bucket"):
        for call in (["log", url], ["mirror", world.repo, url], ["doctor", url, "--json"], ["verify", url, "-v"]):
            done = deltackpt(*call)
            assert done.status == 2, (call, done)
            assert "hunter2" not in done.out + done.err, call
    assert not any(path.read_bytes().count(b"hunter2") for path in tmp_path.rglob("*") if path.is_file())


def test_2_usage(world: World) -> None:
    done = deltackpt("apply", world.repo, "out", "--fresh")
    assert (done.out, done.status) == ("", 2)
    assert done.err == "error: --fresh: found no --cache, expected --cache, whose slots it is about\n"
    done = deltackpt("log", world.repo, "--json", "--nonsense")
    assert (done.json.keys(), done.json["error"], done.status) == (FIELDS, "usage", 2)
    assert done.err == "error: deltackpt log: no such option: --nonsense\n\nhint: deltackpt log --help\n"


def test_a_hint_of_several_lines(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors").write_bytes(b"PK\x03\x04")
    done = deltackpt("write", tmp_path / "in", tmp_path / "repo")
    assert done.status == 5
    assert "Convert it where you trust it:\n  safetensors.torch.save_file(" in done.err


def test_3_bad_bytes_and_what_verify_finds(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    (part,) = repo.glob("patches/00000002-*/part-00001.safetensors")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    done = deltackpt("apply", repo, tmp_path / "out")
    assert (done.out, done.status) == ("", 3)
    size, sha = f"{len(data):,}", done.err.partition("sha256 ")[2][:16]
    assert masked(done.err.replace(f"({size})", "(<size>)"), repo=repo, sha=sha) == (
        "error: file://<repo>/patches/00000002-<nonce>/part-00001.safetensors: "
        "found other bytes (<size>), expected <n> bytes of sha256 <sha>…\n"
        "\n"
        "hint: It was changed or damaged in the store. "
        "`deltackpt mirror MIRROR REPO --repair` puts it right from a mirror.\n"
    )
    assert not (tmp_path / "out").exists()
    done = deltackpt("verify", repo)
    assert (done.err, done.status) == ("", 3)
    assert "/part-00001.safetensors: found other bytes (" in done.out.splitlines()[0]
    assert done.out.splitlines()[-1].startswith(f"{repo.as_uri()}: 1 finding (manifests 3, ")


@pytest.mark.parametrize("kind", ["anchors/*/model.safetensors", "patches/00000002-*/*"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_all_commands_agree_on_damage(world: World, tmp_path: Path, kind: str, damage: str) -> None:
    repo = world.copy(tmp_path)
    (path,) = repo.glob(kind)
    body = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(body[:-3] if damage == "cut" else body[:-3] + bytes([body[-3] ^ 1]) + body[-2:])
    for call in (
        ("apply", repo, tmp_path / "out"),
        ("apply", repo, tmp_path / "cache", "--cache"),
        ("follow", repo, tmp_path / "followed", "--once"),
        ("verify", repo),
        ("mirror", repo, tmp_path / "copy"),
        ("export", repo, "slime", tmp_path / "slime"),
        ("compact", repo, "--from", 0, "--to", 2),
        ("write", world.steps[3], repo),
    ):
        done = deltackpt(*call)
        assert done.status == (6 if damage == "gone" else 3), (call, done)
        assert str(path.name) in done.out + done.err


def test_what_verify_counts_and_where_it_points(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    done = deltackpt("verify", world.steps[0], "--json")
    assert (done.status, done.json["error"]) == (2, "usage")
    said = f"error: {world.steps[0]}: found a checkpoint directory, expected --against REPO to compare with\n"
    assert done.err == said
    (part,) = repo.glob("patches/00000001-*/part-00001.safetensors")
    part.write_bytes(part.read_bytes()[:-1])
    done = deltackpt("verify", repo, "--json")
    assert done.status == 3
    # Step 1 lacks its patch, so step 2 has no way either.
    assert done.json["checked"]["steps that cannot be restored"] == 2
    assert {f["code"] for f in done.json["findings"]} == {"object-hash", "chain-broken"}
    assert "steps that cannot be restored" not in deltackpt("verify", world.repo, "--json").json["checked"]
    last = deltackpt("verify", repo).out.splitlines()[-1]
    assert last.endswith("steps that cannot be restored 2)")


def test_4_a_base_that_is_not_the_parent(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    before = files(repo)
    done = deltackpt("write", world.steps[3], repo, "--base", world.steps[1])
    assert (done.out, done.status) == ("", 4)
    assert done.err.startswith(f"error: {world.steps[1]}: found other tensors than the parent step (")
    assert files(repo) == before


def test_5_a_checkpoint_that_cannot_be_used(tmp_path: Path) -> None:
    odd = tmp_path / "[red]x\x1b[31m"
    odd.mkdir()
    done = deltackpt("write", odd, tmp_path / "repo")
    assert (done.out, done.status) == ("", 5)
    need = "a safetensors file, or an index of several"
    assert done.err == (
        f"error: {tmp_path}/[red]x\\x1b[31m: found an empty directory, expected {need}\n"
        "\n"
        "hint: Name the directory that save_pretrained wrote.\n"
    )
    assert not (tmp_path / "repo").exists()


def test_6_not_there(world: World, tmp_path: Path) -> None:
    done = deltackpt("log", tmp_path / "nothing", "--json")
    assert done.status == done.json["exit_code"] == 6
    assert (done.json.keys(), done.json["error"]) == (FIELDS, "repository-missing")
    assert done.err == (
        f"error: {(tmp_path / 'nothing').as_uri()}: found no deltackpt.json, expected a repository\n"
        "\n"
        "hint: `deltackpt write CHECKPOINT_DIR REPO` makes one where there is nothing. "
        "If it was lost, `deltackpt mirror MIRROR REPO --repair` puts it back.\n"
    )
    done = deltackpt("apply", world.repo, tmp_path / "out", "--step", 9, "--verbose")
    assert (done.out, done.status) == ("", 6)
    assert done.err.startswith("Traceback (most recent call last):\n")
    assert "found no such step, expected step 9\n" in done.err


def test_7_conflict(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = deltackpt("apply", world.repo, tmp_path)
    assert (done.out, done.status) == ("", 7)
    start = f"error: {tmp_path}: found something there, expected no such path, or an empty directory\n\nhint: "
    assert done.err.startswith(start)


def test_8_a_store_that_does_not_answer(world: World) -> None:
    fail = "import os; opened = os.open\ndef broken(path, *a, **k):\n"
    fail += "    if str(path) == 'deltackpt.json': raise OSError(5, 'Input/output error')\n"
    fail += "    return opened(path, *a, **k)\nos.open = broken"
    done = deltackpt("log", world.repo, before=fail)
    assert (done.out, done.status) == ("", 8)
    assert "/deltackpt.json: found Input/output error, expected " in done.err


def test_9_no_space(world: World, tmp_path: Path) -> None:
    full = "import os, types; os.statvfs = lambda path: types.SimpleNamespace(f_bavail=1, f_frsize=512)"
    done = deltackpt("apply", world.repo, tmp_path / "out", before=full)
    assert (done.out, done.status) == ("", 9)
    assert ": found 512 bytes free, expected " in done.err
    assert list(tmp_path.iterdir()) == []


def test_130_an_interrupt_publishes_nothing(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    before = files(repo)
    done = interrupted("write", world.steps[3], repo, method="put", when="before")
    assert (done.out, done.err, done.status) == ("", "interrupted\n", 130)
    assert files(repo) == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_130_an_interrupt_at_the_ref_leaves_the_old_step_or_the_new_one(
    world: World, tmp_path: Path, when: str
) -> None:
    repo = world.copy(tmp_path)
    done = interrupted("write", world.steps[3], repo, method="swap", when=when)
    assert (done.out, done.err, done.status) == ("", "interrupted\n", 130)
    done = deltackpt("apply", repo, tmp_path / "out", "--json")
    assert (done.status, done.json.get("step")) == (0, 2 if when == "before" else 3)


def test_a_reader_that_leaves_is_no_error(world: World) -> None:
    line = command("log", world.repo)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0  # the log was made; see test_cli_streams


def test_steps_are_told_together() -> None:
    assert [text.steps(numbers) for numbers in ([4], [5, 4], [9, 1, 4, 5, 6, 8])] == [
        "step 4",
        "steps 4, 5",
        "steps 1, 4 to 6, 8, 9",
    ]


@pytest.mark.parametrize(
    ("name", "status"),
    [("patch_that_leaves_a_tensor_over", 4), ("patch_of_parts_of_two_versions", 3), ("gap_that_a_fold_closes", 0)],
)
def test_apply_and_verify_agree(tmp_path: Path, name: str, status: int) -> None:
    """On what the format refuses, and on what edges alone lead to; with a cache, too."""
    repo = shutil.copytree(ROOT / "fixtures/chains" / name, tmp_path / "repo")
    calls = [("apply", repo, tmp_path / "out"), ("apply", repo, tmp_path / "cache", "--cache"), ("verify", repo)]
    assert [deltackpt(*call).status for call in calls] == [status] * 3
