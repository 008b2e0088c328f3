"""A step's tensors as columns are the tasks that are made of each by itself; no kernel runs."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.decode_tables import check_same  # noqa: E402
from support.lists import of_classes, pair  # noqa: E402

from deltackpt import kernels  # noqa: E402
from deltackpt.codecs import Change, Encoded, Entry, encode  # noqa: E402
from deltackpt.codecs.packed import grid  # noqa: E402
from deltackpt.engines import card  # noqa: E402
from deltackpt.engines.card_columns import column_tasks  # noqa: E402
from deltackpt.engines.module import WeightPlace  # noqa: E402
from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.format.layout import TensorsByName  # noqa: E402
from deltackpt.format.safetensors_header import Tensor, build_header, parse_header  # noqa: E402
from deltackpt.gpu import decode_tables, room  # noqa: E402
from deltackpt.gpu.native_tables import filled  # noqa: E402
from deltackpt.gpu.room import Need, Room  # noqa: E402
from deltackpt.patch.part import Origin, PartReader, PartWriter  # noqa: E402
from deltackpt.restore.patch_reader import PatchReader  # noqa: E402
from deltackpt.torch_views.words import NAMES  # noqa: E402

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")
TORCH = {name: dtype for dtype, name in NAMES.items()}
HERE = torch.device("cpu")
ORIGIN = Origin("ab" * 16, 1, "cd" * 32, "ef" * 32)
CASES = {  # by part
    "a.0": ("BF16", (70, 130), "classes"), "a.1": ("F32", (50, 20), "weights"), "a.2": ("F8_E4M3", (30, 40), "weights"),
    "a.3": ("U8", (90, 70), "any"), "b.0": ("BF16", (64, 40), "classes"), "b.1": ("BF16", (64, 40), "full"),
    "b.2": ("BF16", (9,), "weights"), "b.3": ("BF16", (300, 40), "weights"), "c.0": ("F32", (7, 3), "weights"),
    "c.1": ("BF16", (64, 40), "unchanged"), "c.2": ("BF16", (33, 44), "shared"), "c.3": ("BF16", (20, 30), "turned"),
    "c.4": ("BF16", (64, 40), "other"), "c.5": ("BF16", (40, 50), "weights"),
}  # fmt: skip


class Step:
    """A patch in three parts, and where the tensors are."""

    def __init__(self):
        self.found, self.payloads, tensors, at = {}, {}, [], 0
        writers = {part: PartWriter(ORIGIN) for part in "abc"}
        for number, (name, (dtype, shape, kind)) in enumerate(CASES.items()):
            if kind == "classes":
                _, old, new, _ = of_classes(dtype, shape, 12 if number else 5, 0.2)
            else:
                old, new = pair(dtype, shape, number, 400, "any" if kind == "any" else "weights")
            words = torch.from_numpy(old.copy()).view(TORCH[dtype]).view(shape)
            if kind == "turned":
                words = words.t().contiguous().t()
            self.found[name] = WeightPlace(name, words, DTYPES[dtype], shape, kind == "shared")
            tensors.append(Tensor(name, dtype, shape, at, at + old.nbytes))
            at += old.nbytes
            if kind == "unchanged":
                continue
            where, form = np.flatnonzero(old != new), (20, 128) if kind == "other" else shape
            change = Change(DTYPES[dtype], form, where, old[where], new[where], old, new)
            used, made = encode(change, form, "full" if kind == "full" else "packed")
            self.payloads[name] = b"".join(bytes(piece) for piece in made.payload)
            writers[name[0]].add(_entry(name, dtype, form, used, made), made)
        data = {part: b"".join(bytes(chunk) for chunk in writer.chunks()) for part, writer in writers.items()}
        self.patch = PatchReader([PartReader(memoryview(data[part]), f"part-{part}") for part in "abc"])
        header = parse_header(build_header(tensors, {}), None, "here")
        self.named = TensorsByName([header])


def _entry(name: str, dtype: str, shape: tuple[int, ...], encoding: str, made: Encoded) -> Entry:
    return Entry(name, encoding, DTYPES[dtype], shape, shape, (0,) * len(shape), made.detail)


@pytest.fixture(scope="module")
def step():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(grid, "CHANGES_PER_TILE", 100)  # small tiles
        return Step()


def same_task(one, other):
    assert one.words.data_ptr() == other.words.data_ptr()
    assert (one.begin, one.size, one.where, one.origin) == (other.begin, other.size, other.where, other.origin)
    assert (one.dtype, one.index.grid, one.index.scale) == (other.dtype, other.index.grid, other.index.scale)
    for name in ("counts", "lengths", "checksums"):
        assert np.array_equal(getattr(one.index, name), getattr(other.index, name))


def test_the_tasks_are_those_of_each_tensor_by_itself(step):
    columns = column_tasks(step.patch, step.named, step.found)
    alone = card._each_task(step.patch, step.found)
    order = [one for part in "abc" for one in sorted(alone, key=lambda one: one.task.dtype.name) if one.name[0] == part]
    assert [step.named.names[i] for i in columns.tensors] == [one.name for one in order]
    assert {*CASES} - {one.name for one in order} == {"b.1", "c.1", "c.2", "c.3", "c.4"}
    assert [*columns.needs] == [one.task.need for one in order]
    tasks = [task for run in columns._columns for task in run]
    for one, other in zip(tasks, [one.task for one in order], strict=True):
        same_task(one, other)


@pytest.mark.parametrize("seed", range(12))
def test_groups_have_the_bytes_and_the_tables_of_their_tasks(step, seed, monkeypatch):
    monkeypatch.setattr(room, "BEGIN", 1 << (8 + seed))
    monkeypatch.setattr(room, "FOUND", 1 << 40)
    columns = column_tasks(step.patch, step.named, step.found)
    found = list(columns.groups(Room(1 << 40, 1 << 40)))
    assert sum(len(group.tasks) for group in found) == len(columns.needs)
    assert seed < 11 or max(len(group.spans) for group in found) == 2
    names = [step.named.names[i] for i in columns.tensors]
    for group in found:
        data = b"".join(bytes(part.payloads()[begin:end]) for part, begin, end in group.spans)
        tasks = [*group.tasks]
        assert len({task.dtype for task in tasks}) == 1
        for task in tasks:
            assert data[task.begin : task.begin + task.size] == step.payloads[names.pop(0)]
        (one,), (other,) = filled(HERE, [(group.tasks, 0)])(), decode_tables._Tables([(tasks, 0)]).send(HERE)
        check_same(one, other)


def test_what_needs_a_look_at_each_is_not_taken(step):
    assert column_tasks(step.patch, step.named, {**step.found, "d": step.found["a.0"]}) is None
    wide = replace(step.found["a.0"], tensor=torch.zeros(3, dtype=torch.bfloat16))
    assert column_tasks(step.patch, step.named, {**step.found, "a.0": wide}) is None


@pytest.mark.parametrize("seed", range(40))
def test_groups_never_take_more_than_there_is(seed):
    """By what each task needs, and whatever is kept: no more than ``total``, unless one takes more by itself."""
    rng = np.random.default_rng(seed)
    total, most = int(rng.integers(2000, 20000)), int(rng.integers(0, 5000))
    needs = [Need(int(c), bool(rng.random() < 0.2), int(r), int(f), int(f * 3 // 4))
             for c, r, f in rng.integers(0, 900, (200, 3))]  # fmt: skip
    counts = [*Room(total, most).counts(needs)]
    assert sum(counts) == len(needs)
    kept = at = 0
    before = room.NOTHING
    for count in counts:
        group, at = needs[at : at + count], at + count
        taken = sum(n.counts for n in group) * (2 if any(n.far for n in group) else 1) + sum(n.rest for n in group)
        assert count == 1 or taken + before.found + min(kept, most) <= total
        kept += before.kept
        before = Need(0, False, 0, sum(n.found for n in group), sum(n.kept for n in group))
