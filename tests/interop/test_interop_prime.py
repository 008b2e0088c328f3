"""prime-rl: dense broadcasts in and out, and the three drafts of sparse ones in."""

import json

import pytest
from support.foreign_layouts import prime_files, prime_ranks, prime_update
from support.states import make_checkpoint, tree

from deltackpt.errors import FormatError
from deltackpt.interop import export_steps, reader, writer
from deltackpt.interop.protocol import UNVERIFIABLE
from deltackpt.repository import Repository


def dense(world, marker="STABLE"):
    for i, state in enumerate(world.states):
        path = world.src / "broadcasts" / f"step_{i}"
        make_checkpoint(path, state, shards=2, side={"config.json": b"{}"})
        (path / marker).touch()


@pytest.mark.parametrize("marker", ["STABLE", ".sender_ready", "OWN"])
def test_dense_broadcasts_come_in_and_go_out(world, marker):
    dense(world, marker)
    options = {"marker": marker} if marker == "OWN" else {}
    done = world.import_steps(base=None, **options)
    assert (done.format, done.steps) == ("prime-rl", [0, 1, 2, 3, 4])
    world.check()
    out = world.root / "run"
    export_steps(Repository.open(world.repo), "prime-rl", writer("prime-rl", out, marker=marker)[1], out, threads=1)
    assert tree(out) == tree(world.src)


def test_a_step_without_its_marker(world):
    dense(world)
    (world.src / "broadcasts/step_2/STABLE").unlink()
    world.refused("foreign-missing")
    assert not world.repo.exists()


DRAFTS = {
    "files": prime_files,
    "update": prime_update,
    "update under zstd": lambda *a: prime_update(*a, compressed=True),
    "ranks": prime_ranks,
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_come_in(world, draft):
    for i, (old, new) in enumerate(zip(world.states, world.states[1:], strict=False)):
        DRAFTS[draft](world.src, i + 1, old, new)
    done = world.import_steps()
    assert (done.format, done.steps) == ("prime-rl-sparse", [0, 1, 2, 3, 4])
    assert done.proofs["sha256 of the files; unverifiable: no digest" if draft == "ranks" else UNVERIFIABLE] == 4
    world.check()


def test_a_full_step_begins_a_chain(world):
    path = world.src / "broadcasts/step_0"
    make_checkpoint(path, world.states[0], shards=2, side={"config.json": b"{}"})
    (path / "sparse_manifest.json").write_text(
        json.dumps({"format": "prime_rl_sparse_filesystem_v1", "type": "full", "step": 0})
    )
    prime_files(world.src, 1, world.states[0], world.states[1])
    assert world.import_steps(base=None).steps == [0, 1]


def edited(folder, **fields):
    path = next(folder.glob("sparse_*.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("draft", "defect", "code"),
    [
        ("files", lambda f: edited(f, step=7), "foreign-gap"),
        ("files", lambda f: edited(f, base_step=0), "foreign-gap"),
        ("files", lambda f: edited(f, base_step=2), "foreign-field"),
        ("files", lambda f: edited(f, format="other"), "foreign-field"),
        ("files", lambda f: edited(f, patch_files=[]), None),
        ("files", lambda f: edited(f, patch_files=[{"file": "../x", "tensors": []}]), "foreign-field"),
        ("files", lambda f: edited(f, patch_files=3), "foreign-field"),
        ("files", lambda f: next(f.glob("*.safetensors")).unlink(), "foreign-missing"),
        ("update", lambda f: edited(f, tensors=[]), "foreign-names"),
        ("update", lambda f: edited(f, tensors=[{"name": "a.weight", "shape": [1]}]), "foreign-shape"),
        ("ranks", lambda f: edited(f, sha256={}), "foreign-field"),
        ("ranks", lambda f: edited(f, ranks=3), "foreign-missing"),
        ("ranks", lambda f: edited(f, ranks=[0, 0]), "foreign-field"),
        ("ranks", lambda f: edited(f, ranks=1), None),
        ("ranks", lambda f: (f / "rank_0.safetensors").write_bytes(b"x" * 30), "header-too-long"),
        (
            "ranks",
            lambda f: edited(f, sha256={"rank_0.safetensors": "0", "rank_1.safetensors": "0"}),
            "foreign-checksum",
        ),
    ],
)
def test_refused(world, draft, defect, code):
    for i in range(2):
        DRAFTS[draft](world.src, i + 1, world.states[i], world.states[i + 1])
    defect(next(world.src.rglob("step_2")))
    if code is None:  # what the layout cannot tell: said by its proof, taken as it is
        assert world.import_steps().steps == [0, 1, 2]
    else:
        world.refused(code)
        assert not world.repo.exists() or [m.step for m in Repository.open(world.repo).log()] in ([1, 0], [])


def test_a_number_in_two_spellings(tmp_path):
    for name in ("step_1", "step_01"):
        (tmp_path / "broadcasts" / name).mkdir(parents=True)
        (tmp_path / "broadcasts" / name / "STABLE").touch()
    with pytest.raises(FormatError) as error:
        reader("prime-rl", tmp_path)
    assert error.value.code == "foreign-twice"
