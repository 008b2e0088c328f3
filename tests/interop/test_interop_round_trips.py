"""Repository to format to repository: the same state digests; what goes whole says why."""

import numpy as np
import pytest
from support.states import changed, make_checkpoint, random_bytes

from deltackpt.errors import ChainError, ConflictError
from deltackpt.interop import ExportOptions, export_steps, import_steps, reader, writer
from deltackpt.publish.write import write
from deltackpt.repository import Repository

FORMATS = {
    "slime xor": ("slime", {"encoding": "xor"}),
    "slime overwrite": ("slime", {"encoding": "overwrite", "checksum": "adler32"}),
    "slime xor_sparse": ("slime", {"encoding": "xor_sparse"}),
    "trl gap_delta": ("trl", {}),
    "trl raw": ("trl", {"encoding": "raw"}),
    "prime-rl": ("prime-rl", {}),
}


def published(root, states):
    for i, state in enumerate(states):
        write(make_checkpoint(root / "in" / str(i), state, shards=2), root / "repo", threads=1)
    return Repository.open(root / "repo")


def there_and_back(root, repo, kind, **how):
    name, options = FORMATS[kind]
    out = root / "out"
    done = export_steps(repo, name, writer(name, out, **options)[1], out, ExportOptions(**how), threads=1)
    found, source = reader("auto", out)
    assert found == name
    import_steps(found, source, root / "back", threads=1)
    back = Repository.open(root / "back")
    assert [(m.step, m.state) for m in back.log()] == [(m.step, m.state) for m in repo.log()]
    return done


def states_of_a_run():
    rng = np.random.default_rng(3)
    shape = (8, 24)
    states = [{"t": ("BF16", shape, random_bytes(rng, "BF16", shape)), "other": ("BF16", (9,), bytes(18))}]
    for _ in range(2):
        states.append({**states[-1], "t": changed(rng, states[-1]["t"], 0.2)})
    states.append(states[-1])  # a step without changes
    return states


def test_scalars_and_empty_tensors(tmp_path):
    states = [
        {"scalar": ("F32", (), b"\0\0\0\1"), "empty": ("BF16", (0, 4), b""), "w": ("BF16", (2,), b"abcd")},
        {"scalar": ("F32", (), b"\0\0\0\2"), "empty": ("BF16", (0, 4), b""), "w": ("BF16", (2,), b"abce")},
    ]
    for kind in FORMATS:
        root = tmp_path / kind
        there_and_back(root, published(root, states), kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_tensors_that_come_go_or_change_their_shape_go_whole(tmp_path, kind):
    one = {"w": ("BF16", (2, 2), b"abcdefgh"), "x": ("BF16", (1,), b"ab")}
    states = [one, {**one, "new": ("F32", (1,), b"abcd")}, one, {**one, "w": ("BF16", (4,), b"abcdefgh")}]
    states.append({**states[-1], "x": ("BF16", (1,), b"ac")})
    if kind.startswith("trl"):  # an anchor later in a run holds tensors that there were, and no others
        root = tmp_path / "trl"
        repo = published(root, states)
        out = root / "out"
        done = export_steps(repo, "trl", writer("trl", out)[1], out, threads=1)
        assert [number for number, _ in done.whole] == [0, 1, 2, 3]
        return
    done = there_and_back(tmp_path, published(tmp_path, states), kind)
    if kind != "prime-rl":
        assert done.whole[1:] == [(1, "'new' is new"), (2, "'new' is gone"), (3, "'w' has another dtype or shape")]


def test_numbers_with_gaps(tmp_path):
    states = states_of_a_run()
    for i, state in enumerate(states):
        write(make_checkpoint(tmp_path / "in" / str(i), state), tmp_path / "repo", step=10 * i)
    repo = Repository.open(tmp_path / "repo")
    with pytest.raises(ChainError, match="--renumber"):
        there_and_back(tmp_path, repo, "slime xor")
    out = tmp_path / "renumbered"
    done = export_steps(repo, "slime", writer("slime", out)[1], out, ExportOptions(renumber=True), threads=1)
    assert (done.steps, done.numbers) == ([0, 10, 20, 30], [0, 1, 2, 3])
    there_and_back(tmp_path, repo, "prime-rl")


def test_a_number_is_not_written_twice(tmp_path):
    repo = published(tmp_path, states_of_a_run())
    there_and_back(tmp_path, repo, "slime xor")
    with pytest.raises(ConflictError) as error:
        there_and_back(tmp_path, repo, "slime xor")
    assert error.value.code == "output-exists"
