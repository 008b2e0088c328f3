"""Whole directories, file for file, through random chains; and what happens where the repository is damaged."""

import errno
import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.states import State, changed, file_bytes, make_checkpoint, mutate, random_bytes, random_state, tree

from deltackpt.cache import apply_to_cache
from deltackpt.errors import ChainError, ConflictError, DeltackptError, FormatError, NoSpaceError, NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.format.safetensors_header import Tensor, build_header
from deltackpt.patch import many
from deltackpt.publish import step as step_module
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository
from deltackpt.restore import materialize
from deltackpt.restore.journal import Journal
from deltackpt.restore.materialize import apply
from deltackpt.store import open_store
from deltackpt.verification import verify_checkpoint

NEVER = AnchorPolicy(ratio=float("inf"))
seeds = st.integers(0, 2**32 - 1)


def fresh() -> str:
    return f"memory://{uuid4().hex}"


def sides(rng: np.random.Generator):
    """Side files without end: some stay, some change, some come and go."""
    side = {"config.json": b"{}", "tokenizer/vocab.json": b'{"a": 0}', "empty": b"", ".hidden": b"x"}
    while True:
        yield dict(side)
        side["config.json"] = rng.bytes(20) if rng.random() < 0.4 else side["config.json"]
        if rng.random() < 0.3:
            side["chat_template.jinja"] = rng.bytes(int(rng.integers(0, 2000)))
        if rng.random() < 0.3:
            side.pop("tokenizer/vocab.json", None)
        if rng.random() < 0.3:
            side["tokenizer/größe.txt"] = side["config.json"]  # the same bytes under two names


def chain_of(root: Path, seed: int, steps: int) -> list[Path]:
    """Checkpoint directories, each a step after the one before; the shard layout changes too."""
    rng = np.random.default_rng(seed)
    first = random_state(rng)
    states = [first, *(s for _, s in zip(range(steps - 1), mutate(rng, first), strict=False))]
    shards, dirs = int(rng.integers(1, 4)), []
    for i, (state, side) in enumerate(zip(states, sides(rng), strict=False)):
        shards = int(rng.integers(1, 4)) if rng.random() < 0.2 else shards
        dirs.append(make_checkpoint(root / f"step{i}", state, shards=shards, side=side))
    return dirs


def check_steps(repo: Repository, dirs: list[Path], root: Path) -> None:
    for step, path in enumerate(dirs):
        out = root / uuid4().hex
        done = apply(repo, out, step, threads=2)
        assert (done.step, done.path) == (step, str(out))
        assert tree(out) == tree(path)
        shutil.rmtree(out)


# Any chain comes back


@settings(max_examples=max(6, settings().max_examples // 10))
@given(seeds)
def test_any_chain(tmp_path_factory, seed):
    root = tmp_path_factory.mktemp("chain")
    dirs = chain_of(root, seed, 5)
    rng = np.random.default_rng(seed)
    plain, based, mixed = fresh(), fresh(), fresh()
    with pytest.MonkeyPatch.context() as patch:
        for i, path in enumerate(dirs):
            patch.setattr(step_module, "PART_BYTES", 128 << 20)
            results = [
                write(path, plain, anchor=NEVER, threads=1),
                write(path, based, base=dirs[i - 1] if i else None, anchor=replace(NEVER, every=3), threads=3),
            ]
            patch.setattr(step_module, "PART_BYTES", 2000)
            encoding = str(rng.choice(["packed", "index", "nan", "planes", "full"]))
            results.append(write(path, mixed, encoding=encoding, anchor=NEVER))
            assert len({result.state for result in results}) == 1
    for url in (plain, based, mixed):
        check_steps(Repository.open(url), dirs, root)
    shutil.rmtree(root)


def test_a_chain_on_disk(tmp_path):
    dirs = chain_of(tmp_path, 1, 6)
    for i, path in enumerate(dirs):
        write(path, tmp_path / "repo", base=dirs[i - 1] if i % 2 else None, anchor=replace(NEVER, every=4))
    repo = Repository.open(tmp_path / "repo")
    check_steps(repo, dirs, tmp_path)
    assert [m.anchor is not None for m in repo.log()[::-1]] == [i % 4 == 0 for i in range(6)]


def test_steps_one_more_than_the_last(tmp_path):
    """Tied tensors, a step without a change, and a step back to the first state."""
    rng = np.random.default_rng(2)
    first = random_state(rng)
    assert first["tied.weight"] == first["tied.copy"]
    second = {n: changed(rng, v, 0.1) for n, v in first.items()}
    second["tied.copy"] = second["tied.weight"]
    url, states = fresh(), [first, second, second, first]
    dirs = [make_checkpoint(tmp_path / str(i), s, shards=2) for i, s in enumerate(states)]
    results = [write(d, url, anchor=NEVER) for d in dirs]
    assert results[0].state == results[3].state != results[1].state == results[2].state
    assert results[2].changed == 0
    check_steps(Repository.open(url), dirs, tmp_path)


@pytest.mark.parametrize("stem", ["model", "adapter_model", "diffusion_pytorch_model", "weights"])
@pytest.mark.parametrize("shards", [1, 3])
def test_names_of_checkpoints(tmp_path, stem, shards):
    rng = np.random.default_rng(3)
    state, url = random_state(rng), fresh()
    for i, now in zip(range(2), mutate(rng, state), strict=False):
        path = make_checkpoint(tmp_path / str(i), now, shards=shards, stem=stem)
        write(path, url, anchor=NEVER)
        apply(Repository.open(url), tmp_path / f"out{i}")
        assert tree(tmp_path / f"out{i}") == tree(path)


def test_headers_come_back_byte_for_byte(tmp_path):
    """Another writer's order, spaces, escapes, metadata and padding are part of the file."""
    url = fresh()
    for i, data in enumerate((b"\1\2\3", b"\1\2\4")):
        text = b'{ "b\\u00e9" : {"data_offsets":[0,1], "shape":[ 1 ] , "dtype":"U8"},\n'
        text += b'"__metadata__":{"z":"\\u0041","a":""}, "a":{"dtype":"U8","shape":[2,1],"data_offsets":[1,3]} }   \n '
        path = tmp_path / str(i)
        path.mkdir()
        (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
        write(path, url, anchor=NEVER)
        apply(Repository.open(url), tmp_path / f"out{i}")
        assert tree(tmp_path / f"out{i}") == tree(path)


def test_shards_without_tensors_and_in_folders(tmp_path):
    url, path = fresh(), tmp_path / "in"
    rng = np.random.default_rng(4)
    state: State = {"a": ("F16", (8,), random_bytes(rng, "F16", (8,)))}
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "1.safetensors").write_bytes(file_bytes(state))
    (path / "x.safetensors.index.json").write_text('{"weight_map": {"a": "sub/1.safetensors"}, "metadata": {}}')
    write(path, url)
    apply(Repository.open(url), tmp_path / "out")
    assert tree(tmp_path / "out") == tree(path)


def test_a_few_bits_of_a_large_sparse_file(tmp_path):
    """More than one chunk, group and page; and the patch is small."""
    size = 5 << 20
    url = fresh()
    for i in range(2):
        path = tmp_path / str(i)
        path.mkdir()
        head = build_header([Tensor("a", "BF16", (size // 2,), 0, size)], {})
        data = bytearray(size)
        for at in (0, 1 << 20, (1 << 20) - 1, size - 1):
            data[at] = i
        (path / "model.safetensors").write_bytes(head + data)
        done = write(path, url, anchor=NEVER, base=tmp_path / "0" if i else None)
    assert done.changed == 4
    assert done.patch_bytes < 1500
    check_steps(Repository.open(url), [tmp_path / "0", tmp_path / "1"], tmp_path)


# Where it goes


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A repository on disk of four steps (an anchor, three patches), and its directories. Not to be changed."""
    root = tmp_path_factory.mktemp("published")
    dirs = chain_of(root / "dirs", 5, 4)
    for path in dirs:
        write(path, root / "repo", anchor=NEVER, threads=1)
    return root / "repo", dirs


@pytest.fixture
def pair(published, tmp_path):
    """A copy of the repository, and the directories."""
    shutil.copytree(published[0], tmp_path / "repo")
    return tmp_path / "repo", published[1]


def nothing_left(out: Path) -> bool:
    """Neither the output, nor anything beside it."""
    return not out.exists() and not [p.name for p in out.parent.iterdir() if p.name.startswith(f".{out.name}")]


def test_an_output_that_exists(pair, tmp_path):
    url, dirs = pair
    repo = Repository.open(url)
    (tmp_path / "empty").mkdir()
    apply(repo, tmp_path / "empty")
    assert tree(tmp_path / "empty") == tree(dirs[3])
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link2").symlink_to(dirs[0], target_is_directory=True)
    for name in ("empty", "file", "link", "link2", dirs[0]):
        with pytest.raises(ConflictError) as error:
            apply(repo, tmp_path / name)
        assert (error.value.code, error.value.exit_code) == ("output-exists", 7)
    assert (tmp_path / "file").read_bytes() == b"x"
    assert tree(tmp_path / "empty") == tree(dirs[3])


def test_an_output_that_nothing_can_take_the_place_of(pair, tmp_path, monkeypatch):
    """The directory that is worked in, a mount point, and one that was filled while the step was built."""
    repo, out = Repository.open(pair[0]), tmp_path / "out"
    out.mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(out)
        for name in (".", out):
            with pytest.raises(ConflictError, match="worked in"):
                apply(repo, name)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda self: self == out)
        with pytest.raises(ConflictError, match="mount point"):
            apply(repo, out)
    build = materialize.build
    monkeypatch.setattr(materialize, "build", lambda *a: (build(*a), (out / "theirs").touch()))
    with pytest.raises(ConflictError, match="something there"):
        apply(repo, out)
    assert [p.name for p in out.parent.glob("*out*")] == ["out"]
    assert [p.name for p in out.iterdir()] == ["theirs"]


def test_a_pipe_in_the_place_of_a_side_file(pair, tmp_path):
    """Told, and not waited for."""
    repo = Repository.open(pair[0])
    apply(repo, tmp_path / "out")
    side = next(p for p in (tmp_path / "out").iterdir() if p.suffix != ".safetensors")
    side.unlink()
    os.mkfifo(side)
    report = verify_checkpoint(tmp_path / "out", repo, threads=1)
    assert ("not-a-file", str(side)) in [(f.code, f.where) for f in report.findings]


@pytest.mark.parametrize("where", ["Path.open", "Path.open .boot", "Journal.append_run"])
def test_a_managed_cache_on_a_disk_that_fills(pair, tmp_path, monkeypatch, where):
    """Its own small files fail with the same error as the large ones, and the next run ends in the exact step."""
    repo, cache = Repository.open(pair[0]), tmp_path / "cache"
    if where == "Journal.append_run":
        for step in (0, 1):
            apply_to_cache(repo, cache, step, threads=1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    method, _, file = where.partition(" ")
    owner, name = {"Path": Path, "Journal": Journal}[method.partition(".")[0]], method.partition(".")[2]
    real = getattr(owner, name)

    def fill(self, *args, **options):
        if owner is Path and (tmp_path not in self.parents or (file and self.name != file)):
            return real(self, *args, **options)
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fill)
        with pytest.raises(NoSpaceError) as error:
            apply_to_cache(repo, cache, 2, threads=1)
    assert error.value.code == "no-space"
    assert tree(Path(apply_to_cache(repo, cache, 2, threads=1).path)) == tree(pair[1][2])


def test_an_output_in_folders_that_are_not_there(pair, tmp_path):
    url, dirs = pair
    apply(Repository.open(url), tmp_path / "a" / "b" / "c")
    assert tree(tmp_path / "a" / "b" / "c") == tree(dirs[3])


def test_an_output_below_a_file(pair, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(DeltackptError):
        apply(Repository.open(pair[0]), tmp_path / "file" / "out")


def test_a_step_that_is_not_there(pair, tmp_path):
    for step in (4, "no-tag"):
        with pytest.raises(NotFoundError) as error:
            apply(Repository.open(pair[0]), tmp_path / "out", step)
        assert (error.value.code, error.value.exit_code) == ("step-missing", 6)
    assert nothing_left(tmp_path / "out")


def test_no_space_is_known_before(pair, tmp_path, monkeypatch):
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda p: os.statvfs_result([*real(p)[:3], 1, 1, *real(p)[5:10]]))
    monkeypatch.setattr(os, "pwrite", None)  # nothing may be written
    with pytest.raises(NoSpaceError) as error:
        apply(Repository.open(pair[0]), tmp_path / "out")
    assert (error.value.code, error.value.exit_code) == ("no-space", 9)
    assert nothing_left(tmp_path / "out")


@pytest.mark.parametrize("after", [0, 1, 3, 7])
def test_a_disk_that_fills_in_between(pair, tmp_path, monkeypatch, after):
    left, real = [after], os.pwrite

    def full(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        patch.setattr(many, "MOST", 1)  # tensors that are written together
        with pytest.raises(NoSpaceError) as error:
            apply(Repository.open(pair[0]), tmp_path / "out", threads=1)
    assert error.value.code == "no-space"
    assert nothing_left(tmp_path / "out")
    apply(Repository.open(pair[0]), tmp_path / "out")
    assert tree(tmp_path / "out") == tree(pair[1][3])


def test_a_disk_that_fills_with_side_files(pair, tmp_path, monkeypatch):
    real = Path.open

    def full(path, mode="r", *arguments, **options):
        if "x" in mode:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(NoSpaceError):
        apply(Repository.open(pair[0]), tmp_path / "out")
    assert nothing_left(tmp_path / "out")


def test_an_interrupt_leaves_nothing(pair, tmp_path):
    class Interrupt:
        def start(self, what, total): ...

        def advance(self, count):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply(Repository.open(pair[0]), tmp_path / "out", progress=Interrupt())
    assert nothing_left(tmp_path / "out")


# A repository that was changed


def refused(pair, out: Path, kind: type[DeltackptError], code: str) -> None:
    with pytest.raises(kind) as error:
        apply(Repository.open(pair[0]), out, threads=1)
    assert error.value.code == code
    assert all((error.value.where, error.value.have, error.value.need))
    assert nothing_left(out)


def flip(path: Path, at: int) -> bytes:
    good = path.read_bytes()
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    return good


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_changed_patch(pair, tmp_path, step):
    """One bit of its header, of its table, of its data: the hash of the manifest decides."""
    (part,) = (pair[0] / "patches").glob(f"{step:08d}-*/*.safetensors")
    size, head = part.stat().st_size, 8 + int.from_bytes(part.read_bytes()[:8], "little")
    for at in (0, 8, head // 2, head - 1, head, (head + size) // 2, size - 1):
        good = flip(part, at)
        refused(pair, tmp_path / "out", FormatError, "object-hash")
        part.write_bytes(good)
    for other in (good[:-1], good + b"\0", b""):
        part.write_bytes(other)
        refused(pair, tmp_path / "out", FormatError, "object-hash")
    part.unlink()
    refused(pair, tmp_path / "out", NotFoundError, "object-missing")
    part.write_bytes(good)
    apply(Repository.open(pair[0]), tmp_path / "out")
    assert tree(tmp_path / "out") == tree(pair[1][3])


@pytest.mark.parametrize("step", [0, 2, 3])
def test_a_changed_manifest(pair, tmp_path, step):
    (manifest,) = (pair[0] / "steps").glob(f"{step:08d}-*")
    good = manifest.read_bytes()
    for other in (good[:-1], good + b" ", good.replace(b'"step":', b'"step" :'), good.replace(b"0", b"1", 1), b""):
        manifest.write_bytes(other)
        refused(pair, tmp_path / "out", FormatError, "manifest-hash")
    manifest.unlink()
    kind, code = (NotFoundError, "object-missing") if step == 3 else (ChainError, "chain-broken")
    with pytest.raises(DeltackptError) as error:
        apply(Repository.open(pair[0]), tmp_path / "out")
    assert isinstance(error.value, kind) or error.value.code in (code, "step-missing")
    assert error.value.exit_code in (4, 6)
    assert nothing_left(tmp_path / "out")


def test_a_changed_anchor(pair, tmp_path):
    for shard in (pair[0] / "anchors").rglob("*.safetensors"):
        size, head = shard.stat().st_size, 8 + int.from_bytes(shard.read_bytes()[:8], "little")
        if size == head:
            continue
        good = flip(shard, size - 1)
        # A tensor that a later step replaced or removed needs no proof; the first step always does.
        with pytest.raises(FormatError) as error:
            apply(Repository.open(pair[0]), tmp_path / "out", 0)
        assert (error.value.code, error.value.exit_code) == ("object-hash", 3)
        assert str(shard) in error.value.where
        assert nothing_left(tmp_path / "out")
        shard.write_bytes(good[:-1])
        with pytest.raises(FormatError):
            apply(Repository.open(pair[0]), tmp_path / "out", 0)
        assert nothing_left(tmp_path / "out")
        shard.unlink()
        refused(pair, tmp_path / "out", NotFoundError, "object-missing")
        shard.write_bytes(good)


def test_changed_layouts_digests_and_side_files(pair, tmp_path):
    repo = Repository.open(pair[0])
    target = repo.load(repo.find())
    files = [target.layout, target.digests, *(side.file for side in repo.layout(target).side)]
    for file in files:
        path = pair[0] / file.name
        good = path.read_bytes()
        if good:
            flip(path, len(good) // 2)
            refused(pair, tmp_path / "out", FormatError, "object-hash")
        path.write_bytes(good + b"x")
        with pytest.raises(FormatError):
            apply(Repository.open(pair[0]), tmp_path / "out")
        path.unlink()
        refused(pair, tmp_path / "out", NotFoundError, "object-missing")
        path.write_bytes(good)
    apply(Repository.open(pair[0]), tmp_path / "out")


def republished(repo: Repository, **fields) -> Link:
    """The last step again, with other fields and a valid hash."""
    new = replace(repo.load(repo.find()), **fields)
    return repo.publish(new, "main", repo.ref())


def test_a_patch_of_another_step(pair, tmp_path):
    """Its hash is right, and its own metadata says what it belongs to."""
    repo = Repository.open(pair[0])
    republished(repo, patch=repo.load(repo.find(2)).patch)
    refused(pair, tmp_path / "out", ChainError, "part-elsewhere")


def test_a_layout_of_another_step(pair, tmp_path):
    repo = Repository.open(pair[0])
    republished(repo, layout=repo.load(repo.find(0)).layout)
    with pytest.raises(DeltackptError) as error:
        apply(Repository.open(pair[0]), tmp_path / "out")
    assert error.value.exit_code in (3, 4)
    assert nothing_left(tmp_path / "out")


def test_a_step_without_its_patch(pair, tmp_path):
    """A manifest whose parts were left out: the state that comes out is not the one it names."""
    repo = Repository.open(pair[0])
    republished(repo, patch=())
    with pytest.raises(ChainError) as error:
        apply(Repository.open(pair[0]), tmp_path / "out")
    assert error.value.code in ("tensor-differs", "tensor-shape")
    assert nothing_left(tmp_path / "out")


def test_a_parent_with_another_state(pair, tmp_path):
    repo = Repository.open(pair[0])
    republished(repo, base="8" * 64)
    refused(pair, tmp_path / "out", ChainError, "chain-differs")


def test_part_of_an_unknown_version(pair, tmp_path):
    """And of an unknown encoding: rebuilt with valid hashes all the way up."""
    repo = Repository.open(pair[0])
    step = repo.load(repo.find())
    raw = repo.read(step.patch[0], 1 << 30)
    start = 8 + int.from_bytes(raw[:8], "little")
    for old, new, code in (
        (b'"deltackpt":"2"', b'"deltackpt":"9"', "version-unknown"),
        (None, None, "encoding-unknown"),
    ):
        other = raw.replace(old, new) if old else with_unknown_encoding(raw, start)
        file = repo.put(f"patches/00000003-{uuid4().hex[:12]}/part-00001.safetensors", [other])
        assert file.sha256 == hashlib.sha256(other).hexdigest()
        republished(repo, patch=(file, *step.patch[1:]))
        refused(pair, tmp_path / "out", FormatError, code)


def with_unknown_encoding(raw: bytes, start: int) -> bytes:
    """The code after the first name of the table, changed."""
    from deltackpt.patch.part import TABLE, PartReader

    reader = PartReader(memoryview(raw), "part")
    (table,) = (t for t in reader.header.tensors if t.name == TABLE)
    at = start + table.start + 1 + 3 + len(reader.entries[0].name.encode())
    assert raw[at] < 6
    return raw[:at] + b"\x3f" + raw[at + 1 :]


def test_the_store_need_not_be_local(pair, tmp_path):
    """The same through a store that gives no files to map."""
    url, dirs = pair
    memory, disk = open_store(fresh()), open_store(url)
    for info in disk.list(""):
        memory.put(info.name, [disk.get(info.name, 1 << 30)])
    check_steps(Repository.open(memory.url), dirs, tmp_path)
    done = write(dirs[0], memory.url, base=dirs[3])
    assert done.step == 4
