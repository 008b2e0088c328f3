"""What a file that should be safetensors seems to be instead, so that the error can say what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SNIFF_BYTES: Final = 512

CONVERT: Final = (
    "deltackpt reads no pickles, since opening one runs its code. Convert it where you trust it:\n"
    "  safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')\n"
    "or, with transformers: model.save_pretrained(DIR, safe_serialization=True)"
)
_DOWNLOAD: Final = "Download the file again; its URL answered with this instead of the weights."
_UNPACK: Final = "Unpack it first."
_FOREIGN: Final = "Export the model as safetensors."


@dataclass(frozen=True)
class Guess:
    """``what`` completes "this is ..."; ``hint`` says what to do."""

    what: str
    hint: str


_MAGIC: Final = (
    (b"PK\x03\x04", Guess("a zip archive, as torch.save writes", CONVERT)),
    (b"\x1f\x8b", Guess("gzip data", _UNPACK)),
    (b"\x28\xb5\x2f\xfd", Guess("zstd data", _UNPACK)),
    (b"GGUF", Guess("a GGUF file", _FOREIGN)),
    (b"\x93NUMPY", Guess("a numpy file", _FOREIGN)),
    (b"\x89HDF", Guess("an HDF5 file", _FOREIGN)),
    (
        b"version https://git-lfs.github.com/spec/",
        Guess("a git LFS pointer, not the file it stands for", "Run: git lfs pull"),
    ),
)


def sniff(first: bytes, size: int) -> Guess | None:
    """Guess from the ``first`` SNIFF_BYTES of a file of ``size`` bytes that did not parse; None if nothing is known."""
    if size == 0:
        return Guess("an empty file", "Write or download the file again.")
    if size >= 8 and not first.strip(b"\0"):
        return Guess("a file that begins with zeros, as a copy does that was cut off", "Copy or download it again.")
    for magic, guess in _MAGIC:
        if first.startswith(magic):
            return guess
    # A pickle starts with its protocol and an opcode. A safetensors file can start with 80 02 too: the length 640.
    if first[:1] == b"\x80" and first[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and first[2:8].strip(b"\0"):
        return Guess("a pickle, as torch.save writes", CONVERT)
    text = first.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return Guess("an HTML page", _DOWNLOAD)
    if text.startswith(b"<?xml"):
        return Guess("an XML document", _DOWNLOAD)
    if text.startswith((b"{", b"[")):
        return Guess("a JSON document", "Name the safetensors file itself.")
    length = int.from_bytes(first[:8], "little")
    if size < 8 or (length + 8 > size and length < 1 << 32 and first[8:9] in (b"{", b"")):
        return Guess(f"a truncated safetensors file of {size:,} bytes", "Write or download the file again.")
    if text and text.isascii() and text.decode().replace("\n", " ").replace("\r", " ").replace("\t", " ").isprintable():
        return Guess("text", _DOWNLOAD)
    return None
