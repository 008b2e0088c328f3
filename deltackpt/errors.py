"""Every error that deltackpt raises on purpose.

    DeltackptError
    ├── UsageError        exit 2   the call itself is wrong
    ├── FormatError       exit 3   bytes that are not what the format says
    ├── ChainError        exit 4   a patch, base or reader that does not fit the chain
    ├── CheckpointError   exit 5   a checkpoint directory that cannot be used
    ├── NotFoundError     exit 6   a repository, step, tag or object that is not there
    ├── ConflictError     exit 7   somebody else was first, or a plan is stale
    ├── StoreError        exit 8   the store did not answer, or refused
    └── NoSpaceError      exit 9   no room for the result

An error is data: a stable ``code`` (the same word in the vectors, ``--json`` and spec/REGISTRY.md), and four sentences:
``where`` it was found, what was there (``have``), what should be (``need``), and what to do next (``hint``).
"""

from __future__ import annotations


class DeltackptError(Exception):
    """Base of all; ``exit_code`` is what the command leaves with."""

    exit_code = 1

    def __init__(self, code: str, *, where: object, have: object, need: object, hint: str = "") -> None:
        self.code = code
        self.where = str(where)
        self.have = str(have)
        self.need = str(need)
        self.hint = hint
        super().__init__(code, self.where, self.have, self.need, self.hint)

    def __str__(self) -> str:
        text = f"{self.where}: have {self.have}, need {self.need} [{self.code}]"
        return f"{text}\n\nhint: {self.hint}" if self.hint else text

    def to_dict(self) -> dict[str, str | int]:
        return {
            "error": self.code,
            "exit_code": self.exit_code,
            "where": self.where,
            "have": self.have,
            "need": self.need,
            "hint": self.hint,
        }


class UsageError(DeltackptError):
    exit_code = 2


class ExtraMissingError(UsageError, ModuleNotFoundError):
    """``extra-missing`` where a module cannot be imported without a library; an ImportError too."""

    def __init__(self, library: str, where: str, install: str) -> None:
        need = f"the library {library}"
        super().__init__("extra-missing", where=where, have=f"no module {library}", need=need, hint=install)
        self.name = library


class FormatError(DeltackptError):
    exit_code = 3


class ChainError(DeltackptError):
    exit_code = 4


class CheckpointError(DeltackptError):
    exit_code = 5


class NotFoundError(DeltackptError):
    exit_code = 6


class ConflictError(DeltackptError):
    exit_code = 7


class StoreError(DeltackptError):
    exit_code = 8


class NoSpaceError(DeltackptError):
    exit_code = 9
