"""All output of the command: stdout is data, stderr is for people. Nothing else in the command prints.

Text is printed as it is, never as markup; what a terminal might act on is escaped.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from deltackpt.errors import DeltackptError
from deltackpt.util.progress import SILENT, Progress
from deltackpt_cli.secrets import hidden


class Result(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


class Output:
    """Where one call of a command writes."""

    def __init__(self, *, json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.json = json
        self._quiet = quiet
        self.verbose = verbose
        # What the library logs is a note; other handlers, such as those of a test, are left alone.
        logger = logging.getLogger("deltackpt")
        for handler in [handler for handler in logger.handlers if isinstance(handler, _Notes)]:
            logger.removeHandler(handler)
        logger.addHandler(_Notes(self))

    def result(self, result: Result, lines: Callable[[], Iterable[str]]) -> None:
        """The result of the command on stdout: as one JSON object with --json, else as ``lines``."""
        self.data([json.dumps(result.to_dict())] if self.json else lines())

    def data(self, lines: Iterable[str]) -> None:
        """Lines on stdout."""
        _print(sys.stdout, lines)

    def message(self, text: str) -> None:
        """A line on stderr that --quiet does not suppress."""
        _print(sys.stderr, [hidden(text)])

    def note(self, text: str) -> None:
        """A line on stderr, unless --quiet was given."""
        if not self._quiet:
            self.message(text)

    def error(self, error: DeltackptError) -> int:
        """An error on stderr, with --json on stdout too; -> the exit code."""
        if self.json:
            shown = {
                name: hidden(value) if isinstance(value, str) else value for name, value in error.to_dict().items()
            }
            self.data([json.dumps(shown)])
        if self.verbose:
            self._traceback(error)
        self.message(f"error: {error.sentence()}")
        if error.hint:
            _print(sys.stderr, ["", *hidden(f"hint: {error.hint}").split("\n")])
        return error.exit_code

    def bug(self, error: Exception) -> int:
        """An exception that is no error of ours: printed with its traceback."""
        if not self.verbose:
            self._traceback(error)
        return self.error(
            DeltackptError(
                "bug",
                where="deltackpt",
                have=f"{type(error).__name__}: {error}"[:400],
                need="an error that it knows",
                hint="This is a bug. Please report it with the traceback above.",
            ).with_traceback(error.__traceback__)
        )

    def _traceback(self, error: Exception) -> None:
        _print(sys.stderr, hidden("".join(traceback.format_exception(error))).splitlines())

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A bar on stderr while the block runs, if that is a terminal."""
        if self._quiet or not sys.stderr.isatty():
            yield SILENT
            return
        from deltackpt_cli.progress import Bar

        bar = Bar()
        try:
            yield bar
        finally:
            bar.close()


class _Notes(logging.Handler):
    """Warnings of the library as notes of the command."""

    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.note(f"note: {record.getMessage()}")


def _print(stream: TextIO, lines: Iterable[str]) -> None:
    stream.write("".join(f"{printable(line)}\n" for line in lines))
    stream.flush()


def printable(line: str) -> str:
    """The line with whatever a terminal might act on, or not show, as escapes."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in line)
