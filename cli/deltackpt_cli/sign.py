"""`deltackpt sign`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from deltackpt.errors import UsageError
from deltackpt_cli import format as text
from deltackpt_cli.console import Output
from deltackpt_cli.options import Ref, Repo
from deltackpt_cli.signing_options import Sign, Trust

Steps = Annotated[
    list[str] | None,
    typer.Argument(metavar="[STEP]...", show_default=False, help="Numbers, tags, or `latest`, the branch's own step."),
]
All = Annotated[bool, typer.Option("--all", help="Every step of the branch, as far as it was not collected.")]
Edges = Annotated[bool, typer.Option("--edges", help="The folds and later anchors too.")]
Forget = Annotated[
    bool, typer.Option("--forget", help="Take where the branch is now for right, wherever it was signed before.")
]


@dataclass(frozen=True)
class SignedRecords:
    """What was signed, each with the name that it was signed under, if any."""

    key: str
    signed: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        return {"key": self.key, "signed": list(self.signed)}


def sign(
    output: Output,
    repo: Repo,
    steps: Steps = None,
    sign: Sign = None,
    all_: All = False,
    edges: Edges = False,
    forget: Forget = False,
    ref: Ref = "main",
    trust: Trust = None,
) -> None:
    """Sign steps that are there.

    `latest`, which is meant where no step is given, says anew where the branch is: as a second signer, or so that
    readers with --max-age see that it stands still on purpose. A tag is signed as the tag, a number as the step alone.
    """
    from deltackpt.format.signature import fingerprint
    from deltackpt.repository.sign_records import sign_records
    from deltackpt_cli.signing_options import opened

    if steps and all_:
        raise UsageError("usage", where="--all", have="steps too", need="one of the two")
    source = opened(repo, trust, None, sign)
    signer = source.signer
    if signer is None:
        raise UsageError("sign-key", where="sign", have="no key", need="--sign KEY, or DELTACKPT_SIGN_KEY")
    if forget:
        signer.forget(f"refs/{ref}")
    done = sign_records(source, signer, steps or ["latest"], ref, whole=all_, edges=edges)
    found = [{"name": one.statement.ref, **one.statement.link.to_dict()} for one in done]
    rows = [[str(each["step"]), str(each["name"] or ""), str(each["id"])[:12]] for each in found]
    result = SignedRecords(fingerprint(signer.public), tuple(found))
    output.result(result, lambda: text.table([">step", "as", "id"], rows))
