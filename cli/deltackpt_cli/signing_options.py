"""The options of keys: whom a command trusts, and who signs what it publishes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt_cli import units

if TYPE_CHECKING:
    from deltackpt.repository import Repository
    from deltackpt.signing.policy import TrustPolicy

Trust = Annotated[
    str | None,
    typer.Option(
        "--trust",
        metavar="KEYS",
        show_default=False,
        help="Use nothing that these keys did not sign: a file of public keys, one key, or `first-use`. "
        "DELTACKPT_TRUST says the same.",
    ),
]
MaxAge = Annotated[
    str | None,
    typer.Option(
        "--max-age",
        metavar="TIME",
        show_default=False,
        help="With --trust: refuse a branch whose newest signature is older.",
    ),
]
Sign = Annotated[
    str | None,
    typer.Option(
        "--sign",
        metavar="KEY",
        show_default=False,
        help="Sign with this key: its file, or `command:…` that signs. DELTACKPT_SIGN_KEY says the same.",
    ),
]


def policy(trust: str | None, max_age: str | None) -> TrustPolicy | None:
    """What the two options say, or the environment; None where neither says anything."""
    from deltackpt.signing.policy import trust_policy

    return trust_policy(trust, None if max_age is None else units.duration(max_age, "--max-age"))


def opened(repo: str, trust: str | None = None, max_age: str | None = None, sign: str | None = None) -> Repository:
    """The repository, with signatures as the options and the environment say."""
    from deltackpt.repository import Repository

    whom = policy(trust, max_age)  # what is wrong with the options is told first
    found = Repository.open(repo)
    if (trust, max_age, sign) == (None, None, None):
        return found
    return found.secure(whom, sign=sign)
