"""Every dtype through every format: how it is carried, or why it is not, as the table of spec/INTEROP.md says."""

from pathlib import Path

import numpy as np
import pytest
from support.foreign_layouts import BITS, WIDTH, prime_files, prime_ranks, prime_update, slime, slime_v1, trl
from support.states import make_checkpoint, random_bytes
from test_interop_round_trips import FORMATS, published, there_and_back
from test_interop_vllm import receive

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import DeltackptError
from deltackpt.format.dtypes import DTYPES
from deltackpt.interop import READERS, WRITERS, export_steps, reader, writer
from deltackpt.interop.vllm import read
from deltackpt.interop.working import Working, by_name

SPEC = Path(__file__).parent.parent.parent / "spec" / "INTEROP.md"
SHAPE = (8, 24)
LAYOUTS = {
    "slime": [slime, *(lambda *a, e=e: slime(*a, encoding=e) for e in ("overwrite", "xor_sparse"))],
    "slime-v1": [slime_v1, lambda *a: slime_v1(*a, encoding="indices")],
    "trl": [trl, *(lambda *a, f=f: trl(*a, form=f) for f in ("first", "raw"))],
    "prime-rl-sparse": [prime_files, prime_update, prime_ranks],
}


def states_of_all():
    """Three states of a tensor of each dtype, all of which change. Never to a NaN: the last bit of twelve words turns,
    whose upper bits are what a small number has."""
    rng = np.random.default_rng(3)

    def calm(dtype):
        words = np.frombuffer(random_bytes(rng, dtype, SHAPE), f"<u{WIDTH[dtype]}")
        return (words & words.dtype.type(1 if dtype == "BOOL" else (1 << (8 * WIDTH[dtype] - 3)) - 1)).tobytes()

    states = [{dtype: (dtype, SHAPE, calm(dtype)) for dtype in sorted(DTYPES)}]

    def flipped(value, first):
        words = np.frombuffer(value[2], f"<u{WIDTH[value[0]]}").copy()
        words[first : first + 5 * 12 : 5] ^= 1
        return (*value[:2], words.tobytes())

    for first in (7, 9):
        states.append({name: flipped(value, first) for name, value in states[-1].items()})
    return states


@pytest.fixture(scope="module")
def states():
    return states_of_all()


@pytest.fixture(scope="module")
def repo(states, tmp_path_factory):
    """All dtypes in one step."""
    return published(tmp_path_factory.mktemp("dtypes"), states)


def names(dtypes) -> str:
    """As the table has them."""
    left = sorted(DTYPES.keys() - dtypes)
    if not dtypes:
        return "–"
    if len(dtypes) <= len(left):
        return ", ".join(f"`{name}`" for name in sorted(dtypes))
    return "all" + (" but " + ", ".join(f"`{name}`" for name in left) if left else "")


def row(way: str, form: str) -> list[str]:
    """The cells of a format's row: as changes, whole, refused with its code."""
    lines = [[c.strip() for c in line.strip("|\n ").split("|")] for line in SPEC.read_text().splitlines()]
    (found,) = (cells for cells in lines if cells[:2] == [f"`{form}`", way])
    return found[2:5]


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if not kind.startswith("trl")])
def test_written_and_read_back(tmp_path, repo, kind):
    whole = {number for number, _ in there_and_back(tmp_path, repo, kind).whole} - {0}
    need = {"slime": ["all", "–", "–"], "prime-rl": ["–", "all", "–"]}[FORMATS[kind][0]]
    assert row("written", FORMATS[kind][0]) == need
    assert whole == ({1, 2} if kind == "prime-rl" else set())
    if kind == "prime-rl":
        assert row("read", kind) == need


@pytest.mark.parametrize("kind", ["trl gap_delta", "trl raw"])
def test_trl_is_written_and_read_back(tmp_path, states, repo, kind):
    there_and_back(tmp_path, repo, kind)
    made, whole = writer("trl", tmp_path / "trl", **FORMATS[kind][1])[1], {}
    with Checkpoint.open(make_checkpoint(tmp_path / "old", states[0])) as old:
        for i, dtype in enumerate(sorted(DTYPES)):
            path = make_checkpoint(tmp_path / dtype, {**states[0], dtype: states[1][dtype]})
            with Checkpoint.open(path) as new:
                if (why := made.delta(i, old, new, 1)) is not None:
                    whole[dtype] = why
    assert row("written", "trl") == [names(DTYPES.keys() - whole), names(whole), "–"]
    assert all(why == f"{dtype!r} is {dtype}, and TRL carries BF16 only" for dtype, why in whole.items())


def test_vllm_takes_each(tmp_path, states, repo):
    out = tmp_path / "vllm"
    export_steps(repo, "vllm", writer("vllm", out)[1], out, threads=1)
    found, state = {}, states[0]
    with Checkpoint.open(make_checkpoint(tmp_path / "base", states[0])) as base:
        for i, need in enumerate(states[1:], 1):
            for call in read(out / f"step_{i:06d}.safetensors", base):
                state = receive(call, state)
                found |= {patch.name: call.sparse for patch in call.patches}
            assert state == need
    assert found.keys() == DTYPES.keys()
    sparse = {name for name in found if found[name]}
    assert row("written", "vllm") == [names(sparse), names(DTYPES.keys() - sparse), "–"]


@pytest.mark.parametrize("form", LAYOUTS)
def test_changes_are_read(tmp_path, states, form):
    dtypes = sorted(DTYPES)
    refused: dict[str, str] = {}
    with Checkpoint.open(make_checkpoint(tmp_path / "base", states[0])) as base:
        for make in LAYOUTS[form]:
            for dtype in dtypes:
                src = tmp_path / f"{LAYOUTS[form].index(make)}-{dtype}"
                new = {**states[0], dtype: states[1][dtype]}
                make(src, 1, states[0], new)
                try:
                    found, source = reader("auto", src)
                    assert found == form
                    (step,) = source.steps()
                    working = Working.copy(base, src / "working")
                    for item in by_name(source.read(step, base), base, "a step").values():
                        working.apply(item.load())
                except DeltackptError as error:
                    assert refused.setdefault(dtype, error.code) == error.code
                    continue
                assert dtype not in refused
                assert {n: working.bytes_of(n).tobytes() for n in new} == {n: v[2] for n, v in new.items()}
    codes = "".join(f" (`{code}`)" for code in sorted({*refused.values()}))
    assert not refused or refused.keys() == BITS.keys()
    need = [names(DTYPES.keys() - refused), "–", names(refused) + codes]
    have = row("read", form)
    assert [have[0], have[2]] == [need[0], need[2]]


def test_the_table_has_every_format():
    for way, forms in (("read", READERS), ("written", WRITERS)):
        for form in forms:
            assert len(row(way, form)) == 3
