"""Plain changes that came to a card: what is out of order or range is refused before a word is looked at."""

import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402 isort:skip

pytest.importorskip("triton")  # after its mode is set, in the line above


from deltackpt.errors import FormatError  # noqa: E402
from deltackpt.format import state_digest  # noqa: E402
from deltackpt.gpu.places import by_width  # noqa: E402
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
    places = []
    for changes in plain_changes(tasks):
        for name, gain in changes.gained.items():
            assert state_digest.add(want[name][0], gain) == want[name][1]
        places += changes.places
    for write in by_width(places):
        write.apply()
    for one in tasks:
        assert one.words.cpu().numpy().tobytes() == want[one.name][2].tobytes()
