"""A step that names its changes costs these: the bytes published are those that a comparison of all would have made."""

import shutil

import numpy as np
import pytest
from safetensors import deserialize
from support.foreign_layouts import prime_files, slime, trl
from support.foreign_runs import World
from support.states import changed, make_checkpoint, random_bytes

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ChainError, ConflictError
from deltackpt.interop import import_steps, reader
from deltackpt.interop import working as module
from deltackpt.publish.write import write
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply

LAYOUTS = {
    "slime xor": slime,
    "slime overwrite": lambda *a: slime(*a, encoding="overwrite"),
    "stitch": lambda *a: slime(*a, encoding="xor_sparse"),
    "trl": trl,
    "prime files": prime_files,
}


@pytest.fixture(scope="module")
def large():
    """Tensors of every kind of change: small, too large to be scanned, dense, and one whose words move by NaN bits."""
    rng = np.random.default_rng(5)
    shapes = {"large": (1030, 1030), "small": (40, 50), "dense": (300, 400), "wide": (70_000,), "same": (9,)}
    dtypes = {"small": "F32", "wide": "F32"}
    one = {n: (dtypes.get(n, "BF16"), s, random_bytes(rng, dtypes.get(n, "BF16"), s)) for n, s in shapes.items()}
    shares = {"large": 0.002, "small": 0.05, "dense": 0.6, "wide": 0.01}
    assert np.prod(shapes["large"]) > 1 << 20
    return [one, {n: changed(rng, v, shares[n]) if n in shares else v for n, v in one.items()}]


def parts(root):
    """The tensors of every part, the table and the payload among them."""
    found = [deserialize(path.read_bytes()) for path in sorted(root.rglob("part-*.safetensors"))]
    return [{name: (t["dtype"], bytes(t["data"])) for name, t in part} for part in found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_are_those_of_a_comparison(tmp_path, large, layout):
    world = World(tmp_path, large)
    LAYOUTS[layout](world.src, 1, *large)
    done = world.import_steps()
    compared = tmp_path / "compared"
    write(world.base, compared, threads=1)
    apply(Repository.open(world.repo), tmp_path / "new", 1, threads=1)
    write(tmp_path / "new", compared, threads=1)
    repos = [Repository.open(path) for path in (world.repo, compared)]
    (have, _), (need, _) = ([*repo.log()] for repo in repos)
    assert (have.state, have.counts) == (need.state, need.counts)
    world.check()
    assert repos[0].digests(have) == repos[1].digests(need)
    assert done.changed == need.counts.changed_elements
    assert parts(world.repo) == parts(compared)


def test_what_a_step_does_not_change_is_left_alone(world, monkeypatch):
    for i, (old, new) in enumerate(zip(world.states, world.states[1:], strict=False)):
        trl(world.src, i + 1, old, new if i % 2 else {**new, "a.weight": old["a.weight"]})
    copied, hashed, read = [], [], []

    def spy(target, name, note):
        real = getattr(target, name)
        monkeypatch.setattr(target, name, lambda *a: (note(*a), real(*a))[1])

    spy(shutil, "copyfile", lambda source, _: copied.append(source.name))
    spy(module, "xxh3", lambda data: hashed.append(len(data)))
    spy(Checkpoint, "bytes_of", lambda _, name: read.append(name))
    for many in ("read_many", "read_range", "side_by_side"):
        spy(Checkpoint, many, lambda _, names: read.extend(names))
    world.import_steps()
    assert sorted(copied) == sorted(path.name for path in world.base.iterdir())
    size = {name: len(value[2]) for name, value in world.states[0].items()}
    pairs = [*zip(world.states, world.states[1:], strict=False)]
    touched = [
        name
        for i, (old, new) in enumerate(pairs)
        for name in sorted(new)
        if old[name] != new[name] and (i % 2 or name != "a.weight")
    ]
    assert hashed == [size[name] for name in touched]
    assert sorted(read) == sorted(size)  # the base, as it was published


def test_another_writer_or_another_base_meanwhile(world, monkeypatch):
    def at_the_first_step(act):
        name, source = reader("auto", world.src)
        real, done = source.read, []

        def read(step, base):
            if not done:
                done.append(act())
            return real(step, base)

        source.read = read
        return lambda: import_steps(name, source, world.repo, base=world.base, threads=1)

    slime(world.src, 1, world.states[0], world.states[1])
    other = make_checkpoint(world.root / "other", world.states[2], shards=2)
    with pytest.raises(ConflictError) as error:
        at_the_first_step(lambda: write(other, world.repo, threads=1))()
    assert error.value.code == "ref-moved"
    assert [m.step for m in Repository.open(world.repo).log()] == [1, 0]
    shutil.rmtree(world.repo)
    real = module.Working.copy.__func__

    def copy(cls, base, into):
        path = base.root / next(iter(base.shards)).path
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return real(cls, base, into)

    monkeypatch.setattr(module.Working, "copy", classmethod(copy))
    with pytest.raises(ChainError) as broken:
        world.import_steps()
    assert broken.value.code == "base-differs"


def test_a_refused_step_leaves_no_objects(world):
    slime(world.src, 1, world.states[0], world.states[1])
    slime(world.src, 2, world.states[0], world.states[2])  # of another base
    assert world.refused("foreign-digest")
    assert [m.step for m in Repository.open(world.repo).log()] == [1, 0]
    assert not list(world.repo.rglob("patches/*2-*/*.safetensors"))
