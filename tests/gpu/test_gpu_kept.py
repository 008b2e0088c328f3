"""What a step keeps on a device until it is final, and groups that are decoded again for lack of room."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402
from support.lists import pair  # noqa: E402

from deltackpt.codecs.packed import codec  # noqa: E402
from deltackpt.errors import ChainError  # noqa: E402
from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.gpu import decode, kept  # noqa: E402
from deltackpt.gpu.decode import DecodeTask, TaskGroup, decode_groups  # noqa: E402
from deltackpt.gpu.kept import KeptChanges, LateWords  # noqa: E402
from deltackpt.gpu.places import PlacedWords, lend_room  # noqa: E402
from deltackpt.torch_views.words import from_host  # noqa: E402

pytest.importorskip("triton")
heavy = pytest.mark.skipif(False, reason="") if torch.cuda.is_available() else pytest.mark.heavy


def group_of(specs):
    """(dtype, shape, old and new words) of tensors -> their group, its bytes in host memory."""
    data, tasks = b"", []
    for name, shape, old, new in specs:
        at = np.flatnonzero(old != new)
        index, tiles = codec.encode(at, old[at], new[at], old, DTYPES[name], shape)
        words = from_host(old if old.itemsize == 1 else old.view(f"<i{old.itemsize}"), WHERE)
        payload = b"".join(tiles)
        tasks.append(DecodeTask(index, DTYPES[name], words, 7 + len(data), len(payload), "here"))
        data += payload
    return TaskGroup(tasks, torch.frombuffer(bytearray(data), dtype=torch.uint8), 7)


def late(group):
    (decoded,) = decode_groups([TaskGroup(group.tasks, group.data.to(WHERE), group.begin)])
    return LateWords(decoded, group)


def holds(group, which, specs):
    return all(
        np.array_equal(task.words.cpu().numpy().view(spec[2].dtype), spec[which])
        for task, spec in zip(group.tasks, specs, strict=True)
    )


def specs_of(dtype, kind, permille=100):
    return [(dtype, (30, 50), *pair(dtype, (30, 50), seed, permille, kind)) for seed in (1, 2, 3)]


@heavy
@pytest.mark.parametrize("kind", ["weights", "any"])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "U8"])
def test_what_is_decoded_again_is_written_and_undone(dtype, kind):
    specs = specs_of(dtype, kind)
    group = group_of(specs)
    write = late(group)
    for _ in range(2):
        write.revert()  # nothing is written
        assert holds(group, 2, specs)
        write.apply()
        assert holds(group, 3, specs)
        write.apply()
        assert holds(group, 3, specs)
        write.revert()
        assert holds(group, 2, specs)


@heavy
def test_changes_of_exponents_are_all_that_is_kept():
    specs = specs_of("BF16", "weights", 300)
    write = late(group_of(specs))
    write.apply()
    _, positions, old = write._moved
    other = sum(int((((a ^ b) >> 7) & 255 != 0).sum()) for _, _, a, b in specs)
    assert 0 < positions.numel() == old.numel() == other < write.elements


@heavy
@pytest.mark.parametrize("lent", [False, True])
def test_old_words_that_are_looked_at_before(lent):
    specs = specs_of("BF16", "weights")
    group = group_of(specs)
    (decoded,) = decode_groups([TaskGroup(group.tasks, group.data.to(WHERE), group.begin)])
    write = decoded.placed()
    if lent:
        lend_room([write])
    write.look()
    assert holds(group, 2, specs)
    assert write.room == 0
    for _ in range(2):
        write.apply()
        write.look()  # of what was written it has the old words already
        assert holds(group, 3, specs)
        write.revert()
        assert holds(group, 2, specs)


@heavy
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("made", ["late", "kept"])
def test_an_interruption_while_words_are_put_in_place(made, written, monkeypatch):
    specs = specs_of("BF16", "weights")
    group = group_of(specs)
    write = late(group)
    if made == "kept":
        (decoded,) = decode_groups([TaskGroup(group.tasks, group.data.to(WHERE), group.begin)])
        write = decoded.placed()
    put = PlacedWords.put

    def interrupted(self, words):
        if written:
            put(self, words)
        raise KeyboardInterrupt

    monkeypatch.setattr(PlacedWords, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write.apply()
    monkeypatch.setattr(PlacedWords, "put", put)
    assert holds(group, 3 if written else 2, specs)
    write.revert()
    assert holds(group, 2, specs)


@heavy
@pytest.mark.parametrize("where", [0, 777])
def test_words_of_others_are_not_written_over(where):
    specs = specs_of("BF16", "weights", 900)
    group = group_of(specs)
    write = late(group)
    group.tasks[1].words[where] += 1 << 9  # other code wrote there since
    before = [task.words.clone() for task in group.tasks]
    with pytest.raises(ChainError) as caught:
        write.apply()
    assert caught.value.code == "base-differs"
    write.revert()
    assert all(torch.equal(task.words, words) for task, words in zip(group.tasks, before, strict=True))


@heavy
def test_what_fits_is_kept(monkeypatch):
    specs = specs_of("BF16", "weights")
    groups = [group_of([spec]) for spec in specs]
    found = [next(decode_groups([TaskGroup(g.tasks, g.data.to(WHERE), g.begin)])) for g in groups]
    needs = [decoded.tasks[0].need for decoded in found]
    largest, left = max(need.scratch for need in needs), sum(need.found for need in needs)
    monkeypatch.setattr(kept, "SCRATCH", largest)
    monkeypatch.setattr(kept, "TOTAL", largest + left + 1 + 6 * (found[0].elements + found[1].elements))
    changes = KeptChanges(needs)
    made = [changes.keep(decoded, group) for decoded, group in zip(found, groups, strict=True)]
    assert [type(write) for write in made] == [PlacedWords, PlacedWords, LateWords]
    for write in made:
        write.apply()
    assert all(holds(group, 3, [spec]) for group, spec in zip(groups, specs, strict=True))


def peak_of(work):
    """The most bytes of tensors that ``work`` has alive at once, beside those that were there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


@pytest.mark.skipif(torch.cuda.is_available(), reason="it counts what the interpreter would be given")
def test_memory_is_bounded_while_a_dense_step_is_decoded_written_and_undone(monkeypatch):
    """5 % of some tensors, in groups: TOTAL, and what the module says comes to it. What is allocated does not depend on
    what kernels find, so that they need not run; no exponent changes."""
    from support.kernel_keys import launched

    shape, count = (64, 512), 8
    specs = [("BF16", shape, *pair("BF16", shape, seed, 220, "weights")) for seed in range(count)]
    groups = [group_of(specs[i : i + 2]) for i in range(0, count, 2)]
    needs = [t.need for g in groups for t in g.tasks]
    need = max(sum(t.need.scratch for t in g.tasks) for g in groups)
    found = max(sum(t.need.found for t in g.tasks) for g in groups)
    changes = sum(t.index.changes for g in groups for t in g.tasks)
    assert changes > 0.04 * count * shape[0] * shape[1]
    monkeypatch.setattr(kept, "SCRATCH", need)
    monkeypatch.setattr(kept, "FOUND", found)
    monkeypatch.setattr(kept, "TOTAL", need + found + 6 * changes // 2)
    monkeypatch.setattr(decode, "_refuse", lambda *_: None)
    exponents = kept._other_exponents
    monkeypatch.setattr(kept, "_other_exponents", lambda d, e: exponents(replace(d, old=d.new), e))
    writes = []

    def step():
        room = KeptChanges(needs)
        sent = (TaskGroup(g.tasks, g.data.to(WHERE), g.begin) for g in groups)
        for decoded in decode_groups(sent):
            writes.append(room.keep(decoded, groups[len(writes)]))
            del decoded
        lend_room([write for write in writes if isinstance(write, PlacedWords)])
        for write in writes:
            write.apply()
        for write in reversed(writes):
            write.revert()

    with launched(run=False):
        step()  # tables of keys are made once
        writes.clear()
        peak = peak_of(step)
    assert [type(write) for write in writes] == [PlacedWords, PlacedWords, LateWords, LateWords]
    # Copies of bytes that are no whole words; and what one more group found is seen alive here, by whatever holds it.
    assert need - 2000 * 2 < peak <= kept.TOTAL + found + 2000 * 2, (peak, kept.TOTAL)
