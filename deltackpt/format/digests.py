"""The digests of a step: both proofs of every tensor, in an object of its own (FORMAT section "Digests").

A safetensors file with U64 ``sums`` [n, 2] and U8 ``xxh3`` [n, 16], in the order of the layout's tensor names. The
manifest names it by sha256, and the state digest in the manifest is the sha256 of what the sums say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltackpt.errors import ChainError, FormatError
from deltackpt.format import state_digest
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.format.layout import Layout, TensorsByName
from deltackpt.format.safetensors_header import Tensor, build_header, head_size, parse_header
from deltackpt.format.state_digest import TensorDigest

Words = npt.NDArray[np.uint64]
Hashes = npt.NDArray[np.uint8]

VERSION = "1"
MAX_DIGESTS = 256 << 20
UNSTATED = bytes(16)  # in the place of an xxh3: the writer saw no more than pieces of the tensor


class TensorDigests(Mapping[str, TensorDigest]):
    """The digests of all tensors of ``named``, as columns in their order: ``sums``, uint64 [tensors, 2], and ``xxh3``,
    uint8 [tensors, 16]. That of one is made when it is asked for. The columns are not written to.
    """

    def __init__(self, named: TensorsByName, sums: Words, xxh3: Hashes) -> None:
        self.named, self.sums, self.xxh3 = named, sums, xxh3

    def __getitem__(self, name: str) -> TensorDigest:
        number = self.named.numbers[name]
        a, b = self.sums[number].tolist()
        return TensorDigest((a, b), self.xxh3[number].tobytes())

    def __contains__(self, name: object) -> bool:
        return name in self.named.numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self.named.names)

    def __len__(self) -> int:
        return len(self.sums)

    def __reduce__(self) -> tuple[type[dict[str, TensorDigest]], tuple[dict[str, TensorDigest]]]:
        """Another process gets a dict: the tensors of ``named`` are more than it asked for."""
        return dict, (dict(self.items()),)

    @classmethod
    def of(cls, named: TensorsByName, digests: Mapping[str, TensorDigest]) -> TensorDigests:
        """The digests of tensors, which may have those of others too. Raises KeyError where one is missing."""
        if isinstance(digests, TensorDigests) and digests.named is named:
            return digests
        found = [digests[name] for name in named.names]
        sums = np.array([digest.sums for digest in found], np.uint64).reshape(-1, 2)
        return cls(named, sums, hashes([digest.xxh3 for digest in found]))


class DigestRows(NamedTuple):
    """The digests of some tensors: ``sums``, uint64 [n, 2], and ``xxh3``, uint8 [n, 16]."""

    sums: Words
    xxh3: Hashes


def hashes(found: Sequence[bytes]) -> Hashes:
    """Digests of 16 bytes each as rows: uint8 [n, 16]."""
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, 16)


def encode(layout: Layout, digests: Mapping[str, TensorDigest]) -> bytes:
    """The object's bytes. ``digests`` has a row for every tensor of the layout."""
    found, n = TensorDigests.of(layout.named, digests), len(layout.named.names)
    tensors = [Tensor("sums", "U64", (n, 2), 0, 16 * n), Tensor("xxh3", "U8", (n, 16), 16 * n, 32 * n)]
    head = build_header(tensors, {"deltackpt-digests": VERSION})
    return head + found.sums.astype("<u8", copy=False).tobytes() + found.xxh3.tobytes()


def decode(data: bytes, layout: Layout, state: str, where: str) -> TensorDigests:
    """Every tensor's digests by name, checked against the manifest's state digest.

    Raises FormatError ``version-unknown``, ``digests-shape``, ``state-differs``, and what `parse_header` raises.
    """
    header = parse_header(data[: head_size(data[:8], len(data), where)], len(data), where)
    if header.metadata.get("deltackpt-digests") != VERSION:  # [F-DOBJ-1]
        raise FormatError("version-unknown", where=where, have="other metadata", need=f"digests version {VERSION}")
    n = len(layout.named.names)
    found = {t.name: (t.dtype, t.shape) for t in header.tensors}
    if found != {"sums": ("U64", (n, 2)), "xxh3": ("U8", (n, 16))}:  # [F-DOBJ-1]
        raise FormatError("digests-shape", where=where, have=str(found)[:120], need=f"sums and xxh3 of {n} tensors")
    at = {t.name: header.data_start + t.start for t in header.tensors}
    sums = np.frombuffer(data, "<u8", 2 * n, at["sums"]).reshape(-1, 2)
    if (have := layout.state_text.digest(sums)) != state:  # [F-DOBJ-2]
        raise FormatError("state-differs", where=where, have=have, need=f"state digest {state}")
    xxh3 = np.frombuffer(data, np.uint8, 16 * n, at["xxh3"]).reshape(-1, 16)
    return TensorDigests(layout.named, sums, xxh3)


def proves(data: npt.NDArray[np.uint8], dtype: str, need: TensorDigest) -> bool:
    """Are these bytes, uint8 [n], the tensor that the digest is of? By xxh3, or by ``sums`` where no xxh3 is stated."""
    if need.xxh3 != UNSTATED:  # [F-DOBJ-4]
        return state_digest.xxh3(data) == need.xxh3
    return state_digest.of_run(data.view(uint(DTYPES[dtype].width))) == need.sums


def check_digest(data: npt.NDArray[np.uint8], dtype: str, need: TensorDigest, *, where: str, hint: str = "") -> None:
    """Raise ChainError ``tensor-differs`` unless a tensor's bytes, uint8 [n], have the digest that a step gives."""
    if not proves(data, dtype, need):  # [F-APPLY-5]
        have = f"xxh3 {state_digest.xxh3(data).hex()}"
        raise ChainError("tensor-differs", where=where, have=have, need=f"the step's {need}", hint=hint)


def state_of(layout: Layout, digests: Mapping[str, TensorDigest]) -> str:
    """The state digest, hex."""
    return layout.state_text.digest(TensorDigests.of(layout.named, digests).sums)
