"""TRL's branches: every form comes in, the newest goes out; what its layout cannot say is said."""

import os
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from support.foreign_layouts import safetensors, trl, trl_anchor, trl_checksum
from support.foreign_runs import World, run_of

from deltackpt.interop import export_steps, writer
from deltackpt.interop.protocol import UNVERIFIABLE
from deltackpt.repository import Repository


def deltas(world, **options):
    for i, (old, new) in enumerate(zip(world.states, world.states[1:], strict=False)):
        trl(world.src, i + 1, old, new, **options)


@pytest.mark.parametrize("form", ["first", "raw", "gap_delta"])
def test_deltas_come_in(world, form):
    deltas(world, form=form)
    done = world.import_steps()
    assert (done.format, done.steps, done.proofs[UNVERIFIABLE]) == ("trl", [0, 1, 2, 3, 4], 4)
    world.check()


def test_both_widths_of_gaps_occur(world):
    path = trl(world.src, 1, world.states[0], world.states[1])
    with safe_open(path, "numpy") as file:
        assert {str(file.get_slice(k).get_dtype()) for k in list(file.keys()) if k.endswith(".idx")} == {"U16", "U32"}


def test_anchors_dense_deltas_and_partial_ones(world):
    s = world.states
    trl_anchor(world.src, 1, s[0])
    trl(world.src, 2, s[0], s[1])
    trl_anchor(world.src, 3, s[2], folder="deltas")  # dense, though among the deltas
    trl_anchor(world.src, 4, {name: s[3][name] for name in s[3] if s[3][name] != s[2][name]})  # what changed alone
    trl_anchor(world.src, 5, s[4])
    assert world.import_steps().steps == [1, 2, 3, 4, 5]
    world.check(first=1)


def test_an_anchor_alone_is_taken_as_whole_and_said_to_be(world):
    trl_anchor(world.src, 3, world.states[0])
    done = world.import_steps(base=None)
    assert done.steps == [3]
    assert "nothing lists the tensors" in next(iter(done.proofs))


def test_the_earliest_checksum_proves_the_state(world):
    for i, (old, new) in enumerate(zip(world.states, world.states[1:], strict=False)):
        more = {"prev_model_version": str(i), "checksum_sha256": trl_checksum(new)}
        trl(world.src, i + 1, old, new, form="first", **more)
    done = world.import_steps()
    assert done.proofs["sha256 of all parameters; unverifiable: no parent"] == 4
    world.check()
    shutil.rmtree(world.repo)
    (world.root / "more").mkdir()
    other = World(world.root / "more", run_of(0, seed=9))
    other.src = world.src
    other.refused("foreign-digest")


def test_refused(world):
    deltas(world)
    folder = world.src / "deltas"
    two = folder / "step_000002.safetensors"
    two.rename(world.root / "two")
    assert "--trust-numbers" in world.refused("foreign-gap").hint
    (world.root / "two").rename(two)
    os.utime(two, (1, 1))
    assert "another run's" in world.refused("foreign-gap").hint
    world.import_steps(trust_numbers=True)
    world.check()
    shutil.rmtree(world.repo)
    os.utime(two)
    trl_anchor(world.src, 2, world.states[2])
    world.refused("foreign-twice")
    shutil.rmtree(world.src / "anchors")
    trl(world.src, 2, world.states[1], world.states[2], form="nvcomp_cascaded")
    assert "GPU" in world.refused("foreign-codec").have
    trl(world.src, 2, world.states[1], world.states[2], prev_model_version="0")
    world.refused("foreign-gap")
    trl(world.src, 2, world.states[1], world.states[2])
    shutil.rmtree(world.repo)
    world.refused("foreign-base", base=None)


def test_a_missing_number_can_be_a_step_without_changes(world):
    deltas(world)
    (world.src / "deltas/step_000004.safetensors").rename(world.src / "deltas/step_000006.safetensors")
    assert world.import_steps(trust_numbers=True).steps == [0, 1, 2, 3, 6]


@pytest.mark.parametrize(
    ("code", "rows"),
    {
        "foreign-position": [("norm.idx", "I32", [31]), ("norm.val", "BF16", [1])],
        "foreign-position ": [("norm.idx", "I32", [-1]), ("norm.val", "BF16", [1])],
        "foreign-position  ": [("norm.idx", "I32", [4, 4]), ("norm.val", "BF16", [1, 2])],
        "foreign-position   ": [("norm.idx", "U16", [0] * 32), ("norm.val", "BF16", [1] * 32)],
        "foreign-position    ": [("norm.idx", "U32", [2**32 - 1] * 2), ("norm.val", "BF16", [1] * 2)],
        "foreign-length": [("norm.idx", "I32", [1, 2]), ("norm.val", "BF16", [1])],
        "foreign-names": [("norm.idx", "I32", [1]), ("norm.val", "BF16", [1]), ("norm.more", "I32", [1])],
        "foreign-tensor": [("none.idx", "I32", [1]), ("none.val", "BF16", [1])],
        "foreign-tensor ": [("norm.idx", "I32", [1])],
        "foreign-shape": [("norm.idx", "I32", [1]), ("norm.val", "F16", [1])],
        "foreign-shape ": [("norm", "BF16", [1] * 30)],
        "foreign-field": [("norm.idx", "F32", [1]), ("norm.val", "BF16", [1])],
        "foreign-twice": [(f"norm.{k}", t, [1]) for k, t in (("idx", "I32"), ("val", "BF16"), ("indices", "I32"))]
        + [("norm.values", "BF16", [1])],
    }.items(),
)
def test_hostile_files(world, code, rows):
    kinds = {"I32": "<i4", "U16": "<u2", "U32": "<u4", "BF16": "<u2", "F16": "<u2", "F32": "<f4"}
    made = [(n, d, (len(v),), np.array(v).astype(kinds[d]).tobytes()) for n, d, v in rows]
    safetensors(world.src / "deltas/step_000001.safetensors", made, {})
    world.not_taken(code.strip())


def test_an_encoding_that_is_not_that_of_the_positions(world):
    trl(world.src, 1, world.states[0], world.states[1], form="raw")
    path = next(world.src.rglob("*.safetensors"))
    path.write_bytes(path.read_bytes().replace(b'"encoding": "raw"', b'"encoding": "gap"'))
    world.refused("foreign-field")


@pytest.mark.parametrize("encoding", ["gap_delta", "raw"])
def test_what_we_write_is_the_newest_form(world, encoding):
    deltas(world)
    world.import_steps()
    out = world.root / "trl"
    done = export_steps(Repository.open(world.repo), "trl", writer("trl", out, encoding=encoding)[1], out, threads=1)
    assert done.whole == [(0, "it is the first")]
    with safe_open(out / "deltas/step_000001.safetensors", "numpy") as file:
        metadata, keys = file.metadata(), list(file.keys())
    assert metadata.keys() == {
        *("format", "version", "sparse", "model_version", "num_changed_params", "total_changed_elements"),
        *("total_elements", "sparsity", "encoding"),
    }
    assert (metadata["format"], metadata["sparse"], metadata["encoding"]) == ("sparse_weight_patch", "True", encoding)
    assert int(metadata["num_changed_params"]) * 2 == len(keys)
    (world.root / "again").mkdir()
    again = World(world.root / "again", world.states)
    again.src = out
    assert again.import_steps().steps == [0, 1, 2, 3, 4]
    again.check()
