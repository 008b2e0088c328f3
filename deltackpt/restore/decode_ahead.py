"""Tensors that go through a chain of patches in memory, while later patches are still being fetched.

Nothing is written anywhere, and nothing that comes out is proven: the caller compares it with what is there, and proves
the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Thread

from deltackpt.checkpoint.diff import State
from deltackpt.format.dtypes import DTYPES, nbytes
from deltackpt.patch import many
from deltackpt.patch.apply import write_step
from deltackpt.patch.base import Bytes, Patch

HELD = 256 << 20  # bytes of tensors in memory; those beyond go through the patches when they are asked for


class DecodeAhead:
    """``base`` is the state that the patches apply to. Each thread has tensors of its own, and takes patch by patch."""

    def __init__(self, base: State, threads: int) -> None:
        self._base = base
        self._patches: list[Patch] = []
        self._all = self._stopped = False
        self._changed = Condition()
        self._new: dict[str, Bytes] = {}
        shares = _shares(base, threads)
        self._threads = [Thread(target=self._run, args=(names,), name="deltackpt-decode-ahead") for names in shares]

    @classmethod
    @contextmanager
    def of(cls, base: State, patches: Iterable[Patch], threads: int) -> Iterator[tuple[DecodeAhead, list[Patch]]]:
        """All patches, in this order, and what they make of the tensors that fit into HELD."""
        ahead = cls(base, threads)
        try:
            for thread in ahead._threads:
                thread.start()
            for patch in patches:
                with ahead._changed:
                    ahead._patches.append(patch)
                    ahead._changed.notify_all()
            ahead._end()
            yield ahead, ahead._patches
        finally:
            ahead._stopped = True
            ahead._end()
            ahead._new.clear()

    def take(self, name: str) -> Bytes | None:
        """The bytes of a tensor after the last patch, uint8 [n]; None if it has to be decoded.

        The caller owns them from then on, and may write to them; a second call returns None.
        """
        return self._new.pop(name, None)

    def _end(self) -> None:
        with self._changed:
            self._all = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # the system may have refused to start all of them
                thread.join()

    def _arriving(self) -> Iterator[Patch]:
        k = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: k < len(self._patches) or self._all)  # noqa: B023 - called at once
                if self._stopped or k == len(self._patches):
                    return
                patch = self._patches[k]
            yield patch
            k += 1

    def _run(self, names: Sequence[str]) -> None:
        left = set(names)
        new: dict[str, Bytes] = {}
        for patch in self._arriving():
            for name in [name for name in left if patch.tensor(name) is not None]:
                try:
                    fits = self._advance(name, patch, new)
                except Exception:  # raised again when the tensor is asked for, as it is then decoded anew
                    fits = False
                if not fits:
                    left.discard(name)
                    new.pop(name, None)
        if not self._stopped:
            self._new.update(new)

    def _advance(self, name: str, patch: Patch, new: dict[str, Bytes]) -> bool:
        """False for a tensor that becomes another one: the caller of the patches finds that out by itself."""
        if name not in new:
            new[name] = self._base.bytes_of(name).copy()
            self._base.release(name)
        meta, found = self._base.tensors[name], patch.tensor(name)
        return found is None or write_step(new[name], (meta.dtype, tuple(meta.shape)), found)


def _shares(base: State, threads: int) -> list[list[str]]:
    """Names of tensors for each thread, about as many bytes of them each."""
    sizes = {name: nbytes(DTYPES[t.dtype], t.shape) for name, t in base.tensors.items()}
    if len(sizes) > many.MANY:  # small ones go through all patches by runs, which costs less than each here
        sizes = {name: size for name, size in sizes.items() if size > many.RUN}
    shares: list[tuple[int, list[str]]] = [(0, []) for _ in range(threads)]
    left = HELD
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sizes[name] <= left:
            left -= sizes[name]
            lightest = min(range(threads), key=lambda i: shares[i][0])
            shares[lightest] = (shares[lightest][0] + sizes[name], [*shares[lightest][1], name])
    return [names for _, names in shares if names]
