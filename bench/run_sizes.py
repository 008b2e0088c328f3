"""The figures of bench/run.py that are bytes: patches of real chains against their floors."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from rows import Row
from work import Published, Work, publish


def ratio_row(figure: str, steps: Iterable[Published], low: float, high: float, required: float) -> Row:
    chosen = [p for p in steps if low <= p.floor.density <= high]
    if not chosen:
        return Row(figure, None, "x", "no step has this density", required)
    ratios = [p.ratio for p in chosen]
    changes = sum(p.floor.changes for p in chosen)
    packed = 8 * sum(p.result.patch_bytes for p in chosen)
    per_tensor, pooled = (sum(getattr(p.floor, name) for p in chosen) for name in ("bits", "pooled_bits"))
    detail = (
        f"{len(chosen)} steps: min {min(ratios):.3f}, median {statistics.median(ratios):.3f}, max {max(ratios):.3f}; "
        f"together {packed / changes:.2f} bits a change, floor {per_tensor / changes:.2f} "
        f"(steps pooled {pooled / changes:.2f}); "
        f"density {min(p.floor.density for p in chosen):.2%} to {max(p.floor.density for p in chosen):.2%}"
    )
    return Row(figure, max(ratios), "x", detail, required)


def given_row(figure: str, steps: Iterable[Published], low: float, high: float, required: float) -> Row:
    """The same against the floor in the light of the old exponent."""
    chosen = sorted((p for p in steps if low <= p.floor.density <= high), key=lambda p: p.floor.density)
    if not chosen:
        return Row(figure, None, "x", "no step has this density", required)
    shown = chosen[:: max(1, len(chosen) // 6)]
    detail = f"{len(chosen)} steps, whole parts; of each density bits a change, and the ratio: " + ", ".join(
        f"{p.floor.density:.2%} {8 * p.result.patch_bytes / p.floor.changes:.2f} {p.ratio_given:.3f}" for p in shown
    )
    return Row(figure, max(p.ratio_given for p in chosen), "x", detail, required)


def size(work: Work) -> Iterator[Row]:
    """The real chain of the demo; beside it, what the other encodings take."""
    steps = work.published
    yield ratio_row("packed / floor, density .2 to 1 %, worst step", steps, 0.002, 0.01, 1.0)
    yield given_row("packed / floor given the old exponent, worst step", steps, 0.001, 0.1, 1.08)
    grown, floor_bits = 8 * sum(p.grown for p in steps), sum(p.floor.bits for p in steps)
    changes = sum(p.floor.changes for p in steps)
    extra = [p.grown - p.result.patch_bytes for p in steps]
    detail = (
        f"{grown / changes:.2f} bits a change; besides the parts (manifest, digests, layout, changed side files) a "
        f"step takes {statistics.median(extra):,.0f} bytes, at most {max(extra):,}"
    )
    yield Row("all that the repository grows by / floor", grown / floor_bits, "x", detail)
    chain = work.chain("1e-6", 20)
    middle = len(chain) // 2
    for encoding in ("auto", "index", "nan", "planes"):
        one = next(publish(work, chain[middle - 1 : middle + 1], encoding))
        bits = 8 * one.result.patch_bytes / one.floor.changes
        detail = (
            f"step {middle}, density {one.floor.density:.2%}: {one.result.patch_bytes:,} bytes, {one.ratio:.2f} x floor"
        )
        yield Row(f"{encoding}, bits a change", bits, "b", detail)


def chains(work: Work) -> Iterator[Row]:
    """Slower and faster learning, for the densities around it."""
    found: list[Published] = []
    for lr, steps in (("3e-7", 20), ("1e-5", 6)):
        found += publish(work, work.chain(lr, steps))
    every = [*work.published, *found]
    yield ratio_row("packed / floor, density .1 to 5 %, worst step", every, 0.001, 0.05, 1.05)
    yield given_row("packed / floor given the old exponent, .1 to 10 %, worst step", every, 0.001, 0.1, 1.08)


def fp32(work: Work) -> Iterator[Row]:
    """Full-precision checkpoints one AdamW step apart; embeddings of absent tokens do not change, so both are told."""
    steps = list(publish(work, work.chain("1e-6", 3, "fp32"), "auto"))
    of_all = [8 * p.result.patch_bytes / p.floor.elements for p in steps]
    of_changed = [8 * p.result.patch_bytes / p.floor.changes for p in steps]
    floors = ", ".join(f"{p.floor.bits / p.floor.changes:.2f}" for p in steps)
    detail = "steps: " + ", ".join(f"{bits:.2f}" for bits in of_all)
    yield Row("fp32 pair, bits an element, worst step", max(of_all), "b", detail, 12)
    detail = "steps: " + ", ".join(f"{bits:.2f}" for bits in of_changed) + f"; floor {floors}"
    yield Row("fp32 pair, bits a changed element", max(of_changed), "b", detail, 12)
