"""Every error that deltackpt raises on purpose.

    DeltackptError
    ├── UsageError        exit 2   the call itself is wrong
    ├── FormatError       exit 3   bytes that are not what the format says
    ├── ChainError        exit 4   a patch, base or reader that does not fit the chain
    ├── CheckpointError   exit 5   a checkpoint directory that cannot be used
    ├── NotFoundError     exit 6   a repository, step, tag or object that is not there
    ├── ConflictError     exit 7   another writer was first, or a plan is stale
    ├── StoreError        exit 8   the store did not answer, or refused
    └── NoSpaceError      exit 9   no room for the result

An error is data: a stable ``code`` (the same word in the vectors, ``--json`` and spec/REGISTRY.md), and four sentences:
``where`` it was found, what was there (``have``), what should be (``need``), and what to do next (``hint``).
"""

from __future__ import annotations


def sentence(where: object, have: object, need: object) -> str:
    """An error, or a finding, on one line, as every command, log and exception shows it."""
    return f"{where}: found {have}, expected {need}"


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
        text = f"{self.sentence()} [{self.code}]"
        return f"{text}\n\nhint: {self.hint}" if self.hint else text

    def sentence(self) -> str:
        """Where it was found, what was there, and what should be, on one line."""
        return sentence(self.where, self.have, self.need)

    def to_dict(self) -> dict[str, str | int]:
        """The object that ``--json`` prints: the code, the exit code and the four sentences."""
        return {
            "error": self.code,
            "exit_code": self.exit_code,
            "where": self.where,
            "have": self.have,
            "need": self.need,
            "hint": self.hint,
        }


class UsageError(DeltackptError):
    """The call itself is wrong: an option, an argument, or a library that is not installed. Exit code 2."""

    exit_code = 2


class ExtraMissingError(UsageError, ModuleNotFoundError):
    """``extra-missing`` where a module cannot be imported without a library; an ImportError too."""

    def __init__(self, library: str, where: str, install: str) -> None:
        need = f"the library {library}"
        super().__init__("extra-missing", where=where, have=f"no module {library}", need=need, hint=install)
        self.name = library


class FormatError(DeltackptError):
    """Bytes that are not what the format says: damaged, cut short, or of no known version. Exit code 3."""

    exit_code = 3


class ChainError(DeltackptError):
    """A patch, base or reader that does not fit the chain: sound bytes of another state. Exit code 4."""

    exit_code = 4


class CheckpointError(DeltackptError):
    """A checkpoint directory that cannot be used: incomplete, changing, or no checkpoint. Exit code 5."""

    exit_code = 5


class NotFoundError(DeltackptError):
    """A repository, step, tag or object that does not exist. Exit code 6."""

    exit_code = 6


class ConflictError(DeltackptError):
    """Another writer was first, or a plan is stale: read again and decide anew. Exit code 7."""

    exit_code = 7


class StoreError(DeltackptError):
    """The store did not answer within the time for retries, or refused. Exit code 8."""

    exit_code = 8


class NoSpaceError(DeltackptError):
    """No room for the result on a disk or in a store; what was there is unharmed. Exit code 9."""

    exit_code = 9


BY_EXIT_CODE = {kind.exit_code: kind for kind in DeltackptError.__subclasses__()}
