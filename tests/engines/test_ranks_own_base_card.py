"""Ranks without a cache whose slices lie on a card: tiles are decoded and summed up there. Without a GPU the kernels
are interpreted."""

import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402 isort:skip
from support.rank_engine import Ranks  # noqa: E402

from deltackpt.engines.slices import rank_slices  # noqa: E402
from deltackpt.engines.slices.card_decoder import CardSliceDecoder  # noqa: E402
from deltackpt.gpu import digest  # noqa: E402

pytest.importorskip("triton")
pytestmark = [] if torch.cuda.is_available() else [pytest.mark.heavy]  # the interpreter takes its time


def test_ranks_decode_on_their_card(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_slices, "kernels_on", lambda devices: torch.device(WHERE))
    monkeypatch.setattr(digest, "has_kernels", lambda device: True)
    one = Ranks(tmp_path, where=WHERE, large=False)
    try:
        assert all(isinstance(receiver._slices.decoder, CardSliceDecoder) for receiver in one.receivers)
        one.step()
        reports = one.update()
        assert {(r.mode, r.path) for r in reports} == {("scatter", "shares")}, [r.reason for r in reports]
        assert all(r.decoded["card"] > 0 for r in reports), [r.decoded for r in reports]
        assert one.holds(1)
        assert {r.checked for r in one.update("check")} == {"16 of 16 tensors"}
        one.update("undo")
        assert one.holds(0)
        one.models[1].fused.data.view(torch.int16).add_(256)
        reports = one.update()
        assert {(r.mode, r.path) for r in reports} == {("reload", "reload")}
        assert "not that of step 0" in reports[0].reason
        assert one.holds(1)
        one.confirm()
        one.step()
        one.step()  # two at once: on the host, from copies of the words
        reports = one.update()
        assert {(r.mode, r.path) for r in reports} == {("scatter", "shares")}, [r.reason for r in reports]
        assert all(r.decoded["card"] == 0 < r.decoded["host"] for r in reports)
        assert one.holds(3)
    finally:
        one.close()
