"""Help: by -h, by --help, and for a call without a word; each ends with examples that the command takes."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from deltackpt_cli.app import app
from deltackpt_cli.examples import EXAMPLES
from support.running import World, deltackpt
from typer.main import get_command

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


def test_a_call_without_a_word_is_help() -> None:
    bare = deltackpt()
    assert (bare.status, bare.err) == (0, "")
    assert bare.out.startswith("Usage: deltackpt [OPTIONS] COMMAND [ARGS]...\n")
    for option in ("-h", "--help"):
        assert deltackpt(option).out.split() == bare.out.split()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_examples(name: str) -> None:
    context = COMMANDS[name].make_context(name, [], resilient_parsing=True, help_option_names=["-h", "--help"])
    shown = context.get_help()
    assert "-h, --help" in shown
    assert "Example" in shown
    for line in EXAMPLES[name]:
        assert f"\n    {line}" in shown  # on a line of its own, as it is


def test_short_help_of_a_command() -> None:
    short, long = deltackpt("log", "-h"), deltackpt("log", "--help")
    assert (short.status, short.err) == (0, "")
    assert short == long
    assert "deltackpt log runs/repo --graph" in short.out


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_is_a_call(line: str) -> None:
    program, name, *rest = shlex.split(line)
    assert program == "deltackpt"
    COMMANDS[name].make_context(name, rest)  # raises for what the command does not take


def test_examples_are_of_commands_that_there_are() -> None:
    assert EXAMPLES.keys() == {*COMMANDS, ""}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "-1"], "--step: found -1, expected a whole number, 0 or more"),
        (["--step", "one"], "--step: found 'one', expected a whole number, 0 or more"),
        (["--step", 10**15 + 1], "--step: found 1000000000000001, expected a number up to 1,000,000,000,000,000"),
        (["--step", 10**30], f"--step: found {10**30}, expected a number up to 1,000,000,000,000,000"),
        (["--threads", "0"], "--threads: found 0, expected a whole number from 1 to 1024"),
        (["--anchor-every", "0"], "--anchor-every: found 0, expected a whole number, 1 or more"),
        (["--anchor-when-ratio", "nan"], "--anchor-when-ratio: found nan, expected a number, 0 or more"),
        (["--anchor-when-ratio", "-1"], "--anchor-when-ratio: found -1.0, expected a number, 0 or more"),
        (["--anchor-when-ratio", "much"], "--anchor-when-ratio: found 'much', expected a number, 0 or more"),
        (["--anchor-when-density", "nan"], "--anchor-when-density: found nan, expected a number, 0 or more"),
        (["--encoding", "pakced"], "--encoding: found 'pakced', expected one of 'auto', 'packed', 'index', 'nan', "),
        (["--resume-from", "-3"], "step: found '-3', expected a number from 0 on, `latest`, NUMBER-ID, or a tag"),
        (["--nonsense"], "deltackpt write: no such option: --nonsense"),
    ],
)
def test_a_wrong_value_in_plain_words(options: list[object], said: str, world: World) -> None:
    new = world.repo.with_name("never")
    place = world.repo if options[0] == "--resume-from" else new
    done = deltackpt("write", world.steps[3], place, *options)
    assert (done.out, done.status) == ("", 2)
    assert done.err.startswith(f"error: {said}")
    assert not new.exists()  # it is refused before anything is made


def test_words_that_are_missing_or_too_many(world: World) -> None:
    assert deltackpt("write").err.startswith("error: deltackpt write: missing argument 'CHECKPOINT_DIR'\n")
    assert deltackpt("nonsense").err == "error: deltackpt: no such command 'nonsense'\n\nhint: deltackpt --help\n"
    assert deltackpt("apply", world.repo, "out", "--step", "-1").err.startswith(
        "error: step: found '-1', expected a num"
    )


def test_a_symlink_in_the_place_of_a_directory_is_named(world: World, tmp_path: object) -> None:
    from pathlib import Path

    root = Path(str(tmp_path))
    (root / "there").mkdir()
    for name, target in (("link", "there"), ("dangling", "nowhere")):
        (root / name).symlink_to(target)
        for options in ([], ["--cache"]):
            done = deltackpt("apply", world.repo, root / name, *options)
            assert done.status == 7
            assert f"{name}: found a symlink to {target}, expected " in done.err
