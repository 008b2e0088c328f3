"""How a trainer's directory is followed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from deltackpt.codecs import parse_choice
from deltackpt.errors import UsageError
from deltackpt.publish.manifest import AnchorPolicy
from deltackpt.repository.refs import check_ref_name
from deltackpt.signing.keys import Signer
from deltackpt.signing.policy import TrustPolicy
from deltackpt.sync.backoff import GRACE, check_grace
from deltackpt.watch.snapshot import PATTERN, compile_pattern


@dataclass(frozen=True)
class WatchOptions:
    """How a trainer's directory is followed, and its steps published.

    ``pattern``      what the checkpoint directories are called, with folders above them if need be; ``{step}`` stands
                     for the number
    ``marker``       a file that the trainer writes into a checkpoint directory last; None where it writes none
    ``settle``       seconds for which a directory must not change where no marker decides
    ``rewind``       follow a trainer that went back and saves steps again, instead of stopping with ``watch-rewritten``
    ``prune_dense``  keep so many published directories; of older ones remove the files that the repository was proven
                     to hold. None keeps all
    ``prune_all``    remove these directories whole, with what the repository does not hold, such as optimizer states
    ``abandon``      seconds after which a directory that stays incomplete no longer holds up later ones; None: never
    ``anchor``, ``encoding``, ``ref``, ``threads``: those of `publish.write.write`
    ``sign``, ``trust``  who signs each step, and whose steps it goes on from: those of `Repository.secure`
    ``grace``        seconds for which the directory or the repository may be gone before watching ends; with
                     ``math.inf`` a directory that was never there is waited for too

    Raises UsageError ``usage``, ``watch-pattern``.
    """

    pattern: str = PATTERN
    marker: str | None = None
    settle: float = 5.0
    rewind: bool = False
    prune_dense: int | None = None
    prune_all: bool = False
    abandon: float | None = None
    anchor: AnchorPolicy = AnchorPolicy()
    encoding: str = "auto"
    ref: str = "main"
    threads: int | None = None
    sign: str | os.PathLike[str] | Signer | None = field(default=None, repr=False)
    trust: str | os.PathLike[str] | TrustPolicy | None = None
    grace: float = GRACE

    def __post_init__(self) -> None:
        check_grace(self.grace)
        check_ref_name(self.ref)
        if self.prune_dense is not None and self.prune_dense < 1:
            need = "1 or more: the newest is what the next one is compared with"
            raise UsageError("usage", where="--prune-dense", have=self.prune_dense, need=need)
        if self.prune_all and self.prune_dense is None:
            need = "--prune-dense K too: how many directories are kept"
            raise UsageError("usage", where="--prune-all", have="no --prune-dense", need=need)
        for name, seconds in (("--settle", self.settle), ("--abandon", self.abandon)):
            if seconds is not None and not seconds >= 0:
                raise UsageError("usage", where=name, have=seconds, need="seconds, 0 or more")
        parse_choice(self.encoding)
        compile_pattern(self.pattern)
