"""What of a directory is published, and what is said of the rest: by the command, on real files."""

import shutil
from pathlib import Path

import pytest
from support.running import checkpoint, deltackpt
from support.states import tree

from deltackpt.repository import Repository


def side_of(repo: Path) -> list[str]:
    opened = Repository.open(repo)
    return [side.path for side in opened.layout(opened.load(opened.find("latest", "main"))).side]


@pytest.mark.parametrize("cache", [False, True])
def test_a_repository_in_the_checkpoint_is_no_part_of_it(tmp_path, cache):
    """Nor is a managed cache. Every step would have all those before it."""
    path = checkpoint(tmp_path / "model", 0)
    repo, sizes = path / "steps/repo", []
    for step in range(4):
        shutil.copy(checkpoint(tmp_path / f"step_{step}", step) / "model.safetensors", path)
        how = ("--cache", path / "cache") if cache and step else ()
        done = deltackpt("write", path, repo, "--json", *how)
        assert done.status == 0
        sizes.append(done.json["bytes"])
        assert side_of(repo) == ["config.json"]
    assert sizes[3] == pytest.approx(sizes[1], rel=0.2)
    assert ["steps/repo/", "a deltackpt repository"] in done.json["left_out"]
    assert (["cache/", "a managed cache"] in done.json["left_out"]) == cache
    assert deltackpt("apply", repo, tmp_path / "out").status == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "step_3")


def test_the_repository_is_not_the_checkpoint_itself(tmp_path):
    path = checkpoint(tmp_path / "model", 0)
    before = tree(path)
    assert deltackpt("write", path, path).status == 7
    assert tree(path) == before


def test_empty_folders_are_named(tmp_path):
    path = checkpoint(tmp_path / "model", 0)
    (path / "a/b").mkdir(parents=True)
    (path / "logs").mkdir()
    done = deltackpt("write", path, tmp_path / "repo", "--json")
    assert done.json["left_out"] == [["a/b/", "an empty folder"], ["logs/", "an empty folder"]]
    assert "logs/" in done.err


def test_private_keys_stay_at_home(tmp_path):
    """Side files go to all readers, and nothing that was published is ever taken back."""
    path, repo = checkpoint(tmp_path / "model", 0), tmp_path / "repo"
    assert deltackpt("keygen", path / "trainer.key").status == 0
    (path / "tls.pem").write_text("-----BEGIN EC PRIVATE KEY-----\nMHcCAQEE\n-----END EC PRIVATE KEY-----\n")
    (path / "README.md").write_text("A key begins with -----BEGIN PRIVATE KEY-----.")
    done = deltackpt("write", path, repo, "--sign", path / "trainer.key", "--json")
    assert done.status == 0, done.err
    assert done.json["left_out"] == [["tls.pem", "a private key"], ["trainer.key", "a private key"]]
    assert "left out trainer.key: a private key" in done.err
    assert side_of(repo) == ["README.md", "config.json", "trainer.key.pub"]
    secret = (path / "trainer.key").read_bytes().splitlines()[1]
    assert not any(secret in data for data in tree(repo).values())
    assert deltackpt("verify", path, "--against", repo).status == 0


def test_strays_are_found_by_verify(tmp_path):
    path = checkpoint(tmp_path / "model", 0)
    deltackpt("write", path, tmp_path / "repo")
    assert deltackpt("verify", path, "--against", tmp_path / "repo").status == 0
    (path / "optimizer.pt").write_bytes(b"of the trainer")
    (path / ".cache").mkdir()
    done = deltackpt("verify", path, "--against", tmp_path / "repo")
    assert (done.status, "other files passed over 2" in done.out) == (0, True)
    (path / "below").mkdir()
    for name in ("model-00002-of-00002.safetensors", "below/more.safetensors"):
        shutil.copy(path / "model.safetensors", path / name)
        done = deltackpt("verify", path, "--against", tmp_path / "repo", "--json")
        assert done.status == 4
        (found,) = done.json["findings"]
        assert (found["code"], found["where"]) == ("file-unknown", str(path / name))
        (path / name).unlink()


def test_links_of_a_hub_cache_and_links_elsewhere(tmp_path):
    made = checkpoint(tmp_path / "made", 0)
    hub = tmp_path / "hub/models--org--name"
    snapshot = hub / "snapshots/abc"
    (hub / "blobs").mkdir(parents=True)
    (snapshot / "sub").mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        shutil.move(made / name, hub / "blobs" / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (snapshot / "sub/again.json").symlink_to("../config.json")
    assert deltackpt("write", snapshot, tmp_path / "repo").status == 0
    assert side_of(tmp_path / "repo") == ["config.json", "sub/again.json"]
    # Downloads of older versions are links from any folder into the cache.
    (tmp_path / "download").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "download" / name).symlink_to(hub / "blobs" / name)
    assert deltackpt("write", tmp_path / "download", tmp_path / "other").status == 0
    for target in ("/etc/passwd", "../../../../made"):
        (snapshot / "notes.txt").symlink_to(target)
        done = deltackpt("write", snapshot, tmp_path / "repo", "--json")
        if Path(target).name == "passwd":
            assert (done.status, done.json["error"]) == (5, "link-escapes")
            assert "/etc/passwd" in done.err
            assert deltackpt("diff", snapshot, snapshot).status == 0  # nothing is published there
        else:
            assert done.status == 0
        (snapshot / "notes.txt").unlink()
    assert len(Repository.open(tmp_path / "repo").log()) == 2
