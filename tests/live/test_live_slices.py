"""Ranks that hold slices, by their own loaders: each pulls its share, and together they prove the step."""

import pytest

torch = pytest.importorskip("torch")

from support.live import TOKEN, Engine, nudge, until  # noqa: E402

from deltackpt.errors import CheckpointError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session, join  # noqa: E402

WIDTH, INNER, VOCABULARY = 1536, 2048, 1024


class Whole(torch.nn.Module):
    """What is trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        shapes = {"embed": (VOCABULARY, WIDTH), "norm": (WIDTH,), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
        shapes |= dict.fromkeys(("q", "k", "v"), (WIDTH, WIDTH))
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape).bfloat16(), requires_grad=False))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


class Slices(torch.nn.Module):
    """Rank ``rank`` of two: rows of the vocabulary, padded, and of q, k and v, fused; columns of the way down."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        shapes = {"embed": (VOCABULARY // 2 + 64, WIDTH), "norm": (WIDTH,), "qkv": (3 * WIDTH // 2, WIDTH)}
        shapes |= {"up": (INNER // 2, WIDTH), "down": (WIDTH, INNER // 2)}
        for name, shape in shapes.items():
            values = torch.zeros(shape, dtype=torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))

    def load_weights(self, weights):
        for name, w in weights:
            rows = slice(self.rank * w.shape[0] // 2, (self.rank + 1) * w.shape[0] // 2) if w.dim() else None
            if name == "embed":
                self.embed.data[VOCABULARY // 2 :].fill_(0)
                self.embed.data[: VOCABULARY // 2].copy_(w[rows])
            elif name in "qkv":
                at = "qkv".index(name) * WIDTH // 2
                self.qkv.data[at : at + WIDTH // 2].copy_(w[rows])
            elif name == "up":
                self.up.data.copy_(w[rows])
            elif name == "down":
                self.down.data.copy_(w[:, self.rank * INNER // 2 : (self.rank + 1) * INNER // 2])
            elif name == "norm":
                self.norm.data.copy_(w)


def expected(model, rank):
    found = Slices(rank)
    found.load_weights(model.state_dict().items())
    return found


def same(a, b):
    return all(
        torch.equal(x.view(torch.int16), y.view(torch.int16))
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def started(address):
    made = []
    for rank in range(2):
        model = Slices(rank)
        made.append(Engine(model, address, engine="tp", rank=(rank, 2), load=model.load_weights))
    return made


def test_two_ranks_take_their_shares(tmp_path):
    model, events = Whole(), []
    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", timeout=60.0, engines=2, report=events.append)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        engines = started(live.address)
        for step in range(3):
            if step:
                nudge(model, step, 0.02)
            before = [e.receiver.received if e.receiver else 0 for e in engines]
            hook.step(step)
            hook.flush()
            for rank, e in enumerate(engines):
                e.reach(step)
                assert not e.errors
                assert same(e.model, expected(model, rank)), (step, rank)
                assert e.steps[-1].way == "live", events
                took, patch = e.receiver.received - before[rank], hook.metrics.bytes
                assert step or took > 0
                assert not step or 0.3 * patch < took < 0.65 * patch
        assert not [e for e in events if e.kind in ("refused", "left")]
        for e in engines:
            e.close()


def test_words_of_another_sign_are_found_by_the_sums_of_both(tmp_path):
    """The rank cannot tell by itself; nobody of its engine writes, and it is loaded again."""
    model, events = Whole(), []
    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", timeout=60.0, engines=2, report=events.append)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        engines = started(live.address)
        hook.step(0)
        for e in engines:
            e.reach(0)
        nudge(model, 1, 0.02)
        hook.step(1)
        for e in engines:
            e.reach(1)
        with torch.no_grad():
            engines[1].model.norm.neg_()
        nudge(model, 2, 0.02)
        hook.step(2)
        for rank, e in enumerate(engines):
            e.reach(2)
            assert same(e.model, expected(model, rank))
        assert [e.text for e in events if e.kind == "refused" and "norm" in e.text]
        for e in engines:
            e.close()


def test_a_late_engine_of_slices(tmp_path):
    model = Whole()
    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", timeout=60.0, report=lambda e: None)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        hook.step(0)
        nudge(model, 1, 0.02)
        hook.step(1)
        engines = started(live.address)
        until(lambda: live.engines == 2)
        assert all(same(e.model, expected(model, rank)) for rank, e in enumerate(engines))
        nudge(model, 2, 0.02)
        hook.step(2)
        for rank, e in enumerate(engines):
            e.reach(2)
            assert e.steps[-1].way == "live"
            assert same(e.model, expected(model, rank))
            e.close()


def test_what_no_sum_and_no_checksum_proves_comes_from_the_repository(tmp_path):
    """Half a model by itself: all weights go without checksums of ranges; the tiles of a step have them."""
    model, events = Whole(), []
    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", timeout=60.0, engines=1, report=events.append)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        half = Slices(0)
        engine = Engine(half, live.address, engine="half", load=half.load_weights)
        hook.step(0)
        engine.reach(0)
        assert [e.text for e in events if e.kind == "refused" and "no checksum" in e.text]
        assert same(half, expected(model, 0))
        until(lambda: live.engines == 1)
        nudge(model, 1, 0.02)
        hook.step(1)
        engine.reach(1)
        assert engine.steps[-1].way == "live"
        assert same(half, expected(model, 0))
        engine.close()


def test_a_loader_that_computes_is_refused(tmp_path):
    model, live = Whole(), Session("127.0.0.1:0", token=TOKEN, report=lambda e: None)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        hook.step(0)
        other = Slices(0)

        def load(weights):
            for name, w in weights:
                if name == "norm":
                    other.norm.data.copy_(w * 2)

        with pytest.raises(CheckpointError) as error:
            join(other, live.address, token=TOKEN, load=load, timeout=20, report=lambda e: None)
        assert error.value.code == "model-differs"
