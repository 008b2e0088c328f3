"""The tables of several groups, made in one pass, are those of each by itself; no kernel runs."""

from dataclasses import fields, replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.decode_tables import check_same  # noqa: E402
from support.lists import of_classes, pair  # noqa: E402

from deltackpt import kernels  # noqa: E402
from deltackpt.codecs.packed import codec, grid  # noqa: E402
from deltackpt.errors import FormatError  # noqa: E402
from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.gpu import decode_tables, native_tables  # noqa: E402
from deltackpt.gpu.decode_task import DecodeTask  # noqa: E402
from deltackpt.gpu.transfers import Sent  # noqa: E402
from deltackpt.torch_views.words import from_host  # noqa: E402

HERE = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(grid, "CHANGES_PER_TILE", 100)


def group(*cases, begin=3):
    """Tasks of the cases, one after the other, from byte 3 on or later; and the group's first byte."""
    tasks, at = [], begin + 5
    for dtype, shape, old, new in cases:
        where = np.flatnonzero(old != new)
        index, tiles = codec.encode(where, old[where], new[where], old, DTYPES[dtype], shape)
        words = from_host(old if old.itemsize == 1 else old.view(f"<i{old.itemsize}"), "cpu")
        tasks.append(DecodeTask(index, DTYPES[dtype], words, at, sum(map(len, tiles)), "here", len(tasks) * 7))
        at += sum(map(len, tiles))
    return tasks, begin


def weights(dtype, shape, seed, permille):
    return dtype, shape, *pair(dtype, shape, seed, permille, "weights")


def classes(shape, seed):
    name, old, new, _ = of_classes("BF16", shape, seed, 0.2)
    return name, shape, old, new


def groups():
    return [
        group(classes((70, 130), 1), weights("BF16", (9,), 2, 400), classes((64, 40), 3)),
        group(weights("U8", (90, 70), 4, 150), weights("U8", (5,), 5, 1000), begin=0),
        group(weights("BF16", (30, 40), 6, 10), begin=1000),
    ]


@pytest.fixture(params=["compiled", "numpy"])
def ways(request, monkeypatch):
    """Both ways to make tables."""
    if request.param == "numpy":
        monkeypatch.setattr(kernels, "LIB", None)
    elif kernels.LIB is None:
        pytest.skip("the kernels were not compiled")


def odd(index, rng):
    """An index with some number that is not as it should be, in one of its arrays."""
    arrays = {name: getattr(index, name).copy() for name in ("counts", "lengths", "checksums")}
    name = rng.choice(["counts", "lengths"])
    flat, wrong = arrays[name].reshape(-1), [-1, 0, 1, 3, 1 << 28, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 62, -(1 << 63)]
    flat[rng.integers(len(flat))] = rng.choice(np.array(wrong, np.int64))
    return replace(index, **arrays)


@pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")
@pytest.mark.parametrize("seed", range(60))
def test_the_kernels_write_what_numpy_does(seed):
    """Also of indices that are refused."""
    rng, found = np.random.default_rng(seed), groups()
    for number, (tasks, begin) in enumerate(found if seed else ()):
        if rng.random() < 0.5:
            at = int(rng.integers(len(tasks)))
            found[number][0][at] = replace(tasks[at], index=odd(tasks[at].index, rng))
    with np.errstate(over="ignore"):
        for one, other in zip(
            native_tables.filled(HERE, found)(), decode_tables._Tables(found).send(HERE), strict=True
        ):
            check_same(one, other)


@pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")
def test_the_kernels_take_arrays_of_any_kind():
    (tasks, begin), *_ = groups()
    (want,) = decode_tables._Tables([(tasks, begin)]).send(HERE)
    index = tasks[0].index
    unaligned = np.frombuffer(b"x" + index.checksums.astype("<u4").tobytes(), "<u4", offset=1)
    for change in (
        {"counts": index.counts.astype(np.uint16)}, {"counts": np.asfortranarray(index.counts)},
        {"lengths": np.repeat(index.lengths, 2)[::2]}, {"checksums": unaligned},
        {"checksums": index.checksums.astype(np.int64)},
    ):  # fmt: skip
        check_same(
            native_tables.filled(HERE, [([replace(tasks[0], index=replace(index, **change)), *tasks[1:]], begin)])()[0],
            want,
        )


@pytest.mark.usefixtures("ways")
def test_several_groups_are_made_as_each_by_itself():
    found = groups()
    for together, some in zip(decode_tables.tables_of(HERE, found), found, strict=True):
        (alone,) = decode_tables.tables_of(HERE, [some])
        for field in fields(alone):
            one, other = getattr(together, field.name), getattr(alone, field.name)
            if isinstance(one, torch.Tensor):
                assert torch.equal(one, other), field.name
                assert one.data_ptr() % 16 == 0 or not one.numel(), field.name
            elif not isinstance(one, Sent):
                assert one == other, field.name
        end = max(task.begin + task.size for task in some[0]) - some[1]
        together.check(some[0], torch.empty(end, dtype=torch.uint8))
        with pytest.raises(AssertionError):
            together.check(some[0], torch.empty(end - 1, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("tile-length", lambda index: replace(index, lengths=index.lengths + 1)),
        ("tile-length", lambda index: replace(index, lengths=index.lengths + (1 << 40))),
        ("count-outside", lambda index: replace(index, counts=index.counts + (1 << 20))),
        ("count-outside", lambda index: replace(index, counts=index.counts + (1 << 32))),
        ("count-outside", lambda index: replace(index, counts=index.counts - (1 << 20))),
    ],
)
@pytest.mark.usefixtures("ways")
def test_an_index_that_is_refused_is_so_in_its_group_alone(code, change):
    found = groups()
    tasks, begin = found[1]
    found[1] = [tasks[0], replace(tasks[1], index=change(tasks[1].index))], begin
    made = decode_tables.tables_of(HERE, found)
    with pytest.raises(FormatError) as error:
        made[1].check(found[1][0], torch.empty(1 << 20, dtype=torch.uint8))
    assert error.value.code == code
    for number in (0, 2):
        made[number].check(found[number][0], torch.empty(1 << 20, dtype=torch.uint8))
        (alone,) = decode_tables.tables_of(HERE, [found[number]])
        for field in ("grids", "spans", "starts", "firsts", "counts", "places", "owner", "bases"):
            assert torch.equal(getattr(made[number], field), getattr(alone, field)), field
