"""A trainer's changes go to a receiver's state by a sink and a source alone."""

from collections import Counter
from collections.abc import Mapping

import pytest

torch = pytest.importorskip("torch")

from support.memory_carrier import Carrier, MemorySink, Received  # noqa: E402

from deltackpt.format import state_digest  # noqa: E402
from deltackpt.format.digests import UNSTATED  # noqa: E402
from deltackpt.format.manifest import Counts  # noqa: E402
from deltackpt.format.state_digest import TensorDigest  # noqa: E402
from deltackpt.hooks.compare import compare  # noqa: E402
from deltackpt.hooks.parts import encode_deltas  # noqa: E402
from deltackpt.hooks.plan import files_of, held_by, plan_state  # noqa: E402
from deltackpt.hooks.state import all_sums  # noqa: E402
from deltackpt.publish.sink import StepCommit, publish_step  # noqa: E402
from deltackpt.publish.step import EncodeOptions  # noqa: E402
from deltackpt.restore.receive import receive  # noqa: E402
from deltackpt.torch_views.extract import pieces_of  # noqa: E402
from deltackpt.torch_views.snapshot import Snapshot  # noqa: E402


def bytes_of(model: torch.nn.Module) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32"}
    return {
        name: (kinds[t.dtype], tuple(t.shape), t.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in model.state_dict().items()
    }


@pytest.mark.parametrize("threads", [1, 3])
def test_a_trainer_s_steps_reach_a_receiver_without_a_repository(threads: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(70, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 9)).bfloat16()
    pieces, carrier = pieces_of(model), Carrier()
    plan = plan_state([held_by(pieces)])
    files = files_of(plan, None, {"config.json": b"{}"}, 1 << 30)
    snapshot, sums = Snapshot(pieces), all_sums(pieces, 1)
    digests: Mapping[str, TensorDigest] = {name: TensorDigest(sums[name], UNSTATED) for name in plan}
    first = MemorySink(carrier, 0)
    start = publish_step(first, lambda: StepCommit(files, digests, Counts(), {}, patched=False))
    state = Received.of(bytes_of(model))
    for step in range(1, 5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 1e-3 * (torch.rand_like(parameter) < 0.2))
        found = (compare(piece, snapshot.array(piece.name)) for piece in pieces_of(model))
        deltas = {delta.name: delta for delta in found if delta is not None}
        sink = MemorySink(carrier, step, part_bytes=400)

        def encode(sink=sink, deltas=deltas, step=step) -> StepCommit:
            before = carrier.digests(carrier.latest())
            share = encode_deltas(sink, carrier.origin(step), deltas, set(plan), EncodeOptions(threads=threads))
            assert share.changed == {name: len(delta.positions) for name, delta in deltas.items()}
            after = {
                name: TensorDigest(state_digest.add(before[name].sums, value), UNSTATED)
                for name, value in share.sums.items()
            }
            return StepCommit(files, {**before, **after}, Counts(changed=len(deltas)), {})

        link = publish_step(sink, encode)
        for delta in deltas.values():
            snapshot.advance(delta)
        data = dict(receive(carrier, state, start, link))
        assert {name: array.tobytes() for name, array in data.items()} == {
            name: value for name, (*_, value) in bytes_of(model).items()
        }
        state, start = Received(carrier.layout(link).tensors, data), link
        names = Counter(e.name for p in carrier.step(link).parts for e in carrier.parts[p.name].entries)
        assert names == Counter(deltas.keys())
    assert carrier.latest().step == 4
