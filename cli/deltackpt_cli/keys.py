"""`deltackpt keys`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltackpt.errors import NotFoundError, UsageError
from deltackpt_cli.console import Output
from deltackpt_cli.options import Repo

if TYPE_CHECKING:
    from deltackpt.format.signature import SignedKeySet

New = Annotated[
    Path | None,
    typer.Option("--set", metavar="KEYS", show_default=False, help="A file of public keys, to be the next key set."),
]
Signs = Annotated[
    list[str] | None,
    typer.Option("--sign", metavar="KEY", show_default=False, help="Keys that agree: of the set before, and the new."),
]


@dataclass(frozen=True)
class ShownKeys:
    """A key set, and how many keys signed it."""

    keys: dict[str, Any]
    signatures: int

    def to_dict(self) -> dict[str, Any]:
        return {**self.keys, "signatures": self.signatures}


def keys(output: Output, repo: Repo, new: New = None, sign: Signs = None) -> None:
    """Show or publish the keys that may sign.

    Shown is the newest key set, as a file that readers can be given with --trust. With --set it is followed by the next
    one, which enough keys of both have to sign: a key that is left out signs nothing any more, nor what it signed.
    """
    from deltackpt.repository.sign_records import newest_keys, publish_keys
    from deltackpt.signing.keys import signer
    from deltackpt.signing.policy import parse_keys
    from deltackpt_cli.signing_options import opened

    source = opened(repo)
    if new is None:
        if sign:
            raise UsageError("usage", where="--sign", have="no --set", need="--set KEYS, the keys to publish")
        found = newest_keys(source)
        if found is None:
            hint = "`--set KEYS --sign KEY` publishes one; until then readers trust the keys that they were given."
            raise NotFoundError("keys-missing", where=repo, have="no key set", need="one", hint=hint)
    else:
        try:
            lines = new.read_text()
        except (OSError, UnicodeError) as error:
            need = "a file of public keys"
            raise UsageError(
                "trust-file", where=new, have=getattr(error, "strerror", None) or "no text", need=need
            ) from None
        signers = [signer(key) for key in (sign or (None,))]
        found = publish_keys(source, parse_keys(lines, new), [one for one in signers if one is not None])
    output.result(ShownKeys(found.keys.to_dict(), len(found.by)), lambda: _lines(found))


def _lines(found: SignedKeySet) -> list[str]:
    from deltackpt.signing.policy import show_keys

    return show_keys(found.keys)
