"""Plain changes that came to a card: what is out of order or range is refused before a word is looked at."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402 isort:skip

pytest.importorskip("triton")  # after its mode is set, in the line above


from deltackpt.errors import FormatError  # noqa: E402
from deltackpt.format import state_digest  # noqa: E402
from deltackpt.gpu.plain import side_by_side  # noqa: E402
from deltackpt.live.card_changes import PlainTask, plain_changes  # noqa: E402


def task(positions, new, name="w", size=100, dtype=torch.int16):
    words = torch.arange(size, dtype=dtype, device=WHERE)
    at = torch.tensor(positions, dtype=torch.int32, device=WHERE)
    return PlainTask(name, f"part, {name!r}", words, at, torch.tensor(new, dtype=dtype, device=WHERE))


@pytest.mark.parametrize(
    ("positions", "code"),
    [
        ([3, 2], "indices-order"),
        ([3, 3], "indices-order"),
        ([3, 100], "indices-order"),
        ([-1, 3], "indices-order"),
        ([-(1 << 31), (1 << 31) - 1], "indices-order"),
        ([1 << 30, 2], "indices-order"),
        ([3], "count-differs"),
    ],
)
def test_what_is_refused(positions, code):
    good, bad = task([1, 2], [7, 8], "a"), task(positions, [5, 6], "b")
    with pytest.raises(FormatError) as error:
        list(plain_changes([good, bad]))
    assert error.value.code == code
    assert "'b'" in error.value.where
    assert torch.equal(bad.words.cpu(), torch.arange(100, dtype=torch.int16))


def test_sums_and_places_of_several_widths():
    tasks = [
        task([0, 99], [7, 8], "a"),
        task([5], [1 << 40], "wide", dtype=torch.int64),
        task([], [], "none"),
        task([2, 3, 4], [0, 255, 9], "bytes", size=256, dtype=torch.uint8),
    ]
    want = {}
    for one in tasks:
        old = one.words.cpu().numpy().copy()
        new = old.copy()
        new[one.positions.cpu().numpy()] = one.new.cpu().numpy()
        unsigned = f"u{old.itemsize}"
        before, after = (state_digest.of_run(a.view(unsigned)) for a in (old, new))
        want[one.name] = (before, after, new)
    writes = []
    for changes in plain_changes(tasks):
        for name, gain in changes.gained.items():
            assert state_digest.add(want[name][0], gain) == want[name][1]
        writes.append(changes.write)
    for write in writes:
        write.apply()
    for one in tasks:
        assert one.words.cpu().numpy().tobytes() == want[one.name][2].tobytes()


@pytest.mark.parametrize("near", [True, False])
def test_more_positions_than_a_program_takes(near):
    """Those of two tensors lie side by side: the first of the second one is less than the last of the first."""
    rng = np.random.default_rng(0)
    counts = [5000, 2100]
    held = torch.zeros(sum(counts) + 4, dtype=torch.int32, device=WHERE)
    at = [np.sort(rng.choice(9000, n, replace=False)).astype(np.int32) for n in counts]
    tasks, ends = [], (0, counts[0]) if near else (1, counts[0] + 3)
    for name, start, where in zip("ab", ends, at, strict=True):
        positions = held[start : start + len(where)].copy_(torch.from_numpy(where))
        words = torch.from_numpy(rng.integers(0, 99, 9000).astype(np.int16)).to(WHERE)
        new = torch.from_numpy(rng.integers(0, 99, len(where)).astype(np.int16)).to(WHERE)
        tasks.append(PlainTask(name, name, words, positions, new))
    joined = side_by_side([task.positions for task in tasks])
    assert (joined.data_ptr() == held.data_ptr()) == near
    assert joined.tolist() == np.concatenate(at).tolist()
    (changes,) = plain_changes(tasks)
    olds = [task.words.cpu().numpy().copy() for task in tasks]
    changes.write.apply()
    for task, where, old in zip(tasks, at, olds, strict=True):
        new = old.copy()
        new[where] = task.new.cpu().numpy()
        assert task.words.cpu().numpy().tobytes() == new.tobytes()
        gain = state_digest.of_change(where.astype(np.int64), old[where].view("u2"), new[where].view("u2"))
        assert changes.gained[task.name] == gain
    changes.write.revert()
    assert [task.words.cpu().numpy().tobytes() for task in tasks] == [old.tobytes() for old in olds]
    tasks[1].positions[2060] = tasks[1].positions[2059]  # in the second program of the second tensor
    with pytest.raises(FormatError) as error:
        list(plain_changes(tasks))
    assert error.value.where == "b"
