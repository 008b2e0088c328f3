"""The application: every command, and what the process leaves with."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from deltackpt import __version__
from deltackpt.errors import DeltackptError, StoreError, UsageError
from deltackpt_cli.apply import apply
from deltackpt_cli.compact import compact
from deltackpt_cli.completion import rejoin_words
from deltackpt_cli.console import Output
from deltackpt_cli.convert import convert
from deltackpt_cli.default_repo import RepoCommand
from deltackpt_cli.diff import diff
from deltackpt_cli.doctor import doctor
from deltackpt_cli.examples import EXAMPLES, shown
from deltackpt_cli.export import export
from deltackpt_cli.follow import follow
from deltackpt_cli.gc import gc
from deltackpt_cli.import_ import import_
from deltackpt_cli.inspect import inspect
from deltackpt_cli.keygen import keygen
from deltackpt_cli.keys import keys
from deltackpt_cli.log import log
from deltackpt_cli.mirror import mirror
from deltackpt_cli.options import command
from deltackpt_cli.pull import pull
from deltackpt_cli.push import push
from deltackpt_cli.refs import refs
from deltackpt_cli.report import report
from deltackpt_cli.serve_adapters import serve_adapters
from deltackpt_cli.serve_updates import serve_updates
from deltackpt_cli.sign import sign
from deltackpt_cli.start import INTERRUPTED
from deltackpt_cli.status import status
from deltackpt_cli.streams import never_fail
from deltackpt_cli.tag import tag
from deltackpt_cli.termination import end_by_signals
from deltackpt_cli.verify import verify
from deltackpt_cli.watch import watch
from deltackpt_cli.write import write

REPOSITORY_COMMANDS = (write, apply, verify, log, inspect, diff, refs, tag, gc, compact, status, report, doctor)
KEY_COMMANDS = (keygen, sign, keys)
TRANSFER_COMMANDS = (mirror, push, pull, follow, serve_updates, serve_adapters, watch, import_, export, convert)
# Help is plain text: its markup would cost the import of rich, and half the time that `--help` may take.
app = typer.Typer(
    rich_markup_mode=None, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)
for function in (*REPOSITORY_COMMANDS, *KEY_COMMANDS, *TRANSFER_COMMANDS):
    name = function.__name__.strip("_").replace("_", "-")
    app.command(name, cls=RepoCommand, epilog=shown(EXAMPLES[name]))(command(function))


def _version(wanted: bool) -> None:
    if wanted:
        from deltackpt import kernels  # here, as it imports numpy

        Output().data([f"deltackpt {__version__}", f"kernels: {kernels.status()}"])
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog=shown(EXAMPLES[""]))
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version and the kernels in use."),
    ] = False,
) -> None:
    """Publish model checkpoints as bit-exact patches, and get any step back exactly.

    Results go to stdout, everything else to stderr. Exit codes: 0 ok, 1 bug, 2 usage, 3 bad bytes, 4 chain does not
    fit, 5 checkpoint unusable, 6 not found, 7 conflict, 8 store unavailable, 9 no space, 130 interrupted.
    """
    if context.invoked_subcommand is None:
        Output().data(context.get_help().splitlines())


def main() -> NoReturn:
    """Run the command line of this process."""
    end_by_signals()
    never_fail()
    if os.environ.get("_DELTACKPT_COMPLETE") == "complete_bash":
        rejoin_words()
    warnings.showwarning = lambda message, *_: logging.getLogger("deltackpt").warning("%s", message)  # a note
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run one command, print what went wrong; -> the exit code. SystemExit for a shell that asks for completions."""
    options = args[: args.index("--")] if "--" in args else args
    output = Output(json="--json" in options, verbose="--verbose" in options)  # also of a line that does not parse
    try:
        code = app(args=list(args), prog_name="deltackpt", standalone_mode=False)
    except DeltackptError as error:
        return output.error(error)
    except _CallError as error:
        return output.error(_usage(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:
        if error.filename is None:
            return output.bug(error)
        return output.error(_of_system(error))
    except Exception as error:
        return output.bug(error)
    if code == INTERRUPTED:  # typer makes this of the signal
        output.message("interrupted")
    return code if isinstance(code, int) else 0


_CallError: type[Exception] = typer.BadParameter.__mro__[1]  # click's UsageError, wherever this typer keeps it


def _of_system(error: OSError) -> StoreError:
    """What the system says of a path: of one that is too long, or that went away while it was used."""
    have, need = error.strerror or str(error), "a path that can be used, and stays"
    found = StoreError("path-unusable", where=str(error.filename)[:400], have=have, need=need)
    return found.with_traceback(error.__traceback__)


def _usage(error: Exception) -> UsageError:
    """What typer says of a call, in our words: of a value, the option that it is of and what that takes."""
    context = getattr(error, "ctx", None)
    call = context.command_path if context else "deltackpt"
    reason = str(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
    parameter = getattr(error, "param", None)
    value, refused, choices = str(getattr(error, "message", "")).rstrip(".").partition(" is not ")
    hint = f"{call} --help"
    if parameter is None or not refused:
        return _Call(
            "usage", where=call, have=reason[:1].lower() + reason[1:], need="a call as its help shows", hint=hint
        )
    least, most = (getattr(parameter.type, bound, None) for bound in ("min", "max"))
    kind = "whole number" if "int" in parameter.type.name else "number"
    if least is not None:
        choices = f"a {kind}, {least} or more" if most is None else f"a {kind} from {least} to {most}"
    return UsageError("usage", where=parameter.opts[0], have=value, need=choices, hint=hint)


class _Call(UsageError):
    """A command line that cannot be read, whose reason is a sentence already."""

    def sentence(self) -> str:
        return f"{self.where}: {self.have}"
