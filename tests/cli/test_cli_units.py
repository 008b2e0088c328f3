"""Options that take a duration, a size or a rate take the same forms, and name them where they cannot read one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltackpt_cli import units
from deltackpt_cli.app import app, run
from typer.main import get_command

from deltackpt.errors import UsageError

READ = {"TIME": units.duration, "SIZE": units.size, "RATE": units.rate}
NEED = {"TIME": units.DURATIONS, "SIZE": units.SIZES, "RATE": units.RATES}
GOOD = {
    "TIME": ["5", "0.5", "500ms", "1s", "1.5m", "2h", "1d", "7 d"],
    "SIZE": ["500000", "64KB", "500 MB", "20GB", "16GiB", "1TB", "2g"],
    "RATE": ["500000", "500KB/s", "100MB/s", "12MiB", "1GB/s"],
}
BAD = {
    "TIME": ["", "soon", "-1s", "1w", "1S", "1e3", "1s 2ms", "100001d"],
    "SIZE": ["", "much", "0", "-1GB", "1PB", "20iB", "20GB/s"],
    "RATE": ["", "fast", "0", "0MB/s", "100MB/h", "100MB/s/s"],
}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of the library's logger as they were: a command in this process adds its own."""
    logger = logging.getLogger("deltackpt")
    before = list(logger.handlers)
    yield
    logger.handlers[:] = before


def options() -> Iterator[tuple[str, Any]]:
    """Every option of every command whose value is one of these."""
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        for param in command.params:
            if param.metavar in READ:
                yield name, param


OPTIONS = [pytest.param(name, param, id=f"{name} {param.opts[0]}") for name, param in options()]


def call(name: str, param: Any, value: str, place: Path) -> list[str]:
    """The command with this option, and of what else it asks for, places where nothing is."""
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    needed = [p for p in command.params if p.required]
    arguments = [str(place / f"none-{p.name}") for p in needed if p.param_type_name == "argument"]
    given = {"--engine": "vllm=http://127.0.0.1:1", "--adapter": "math"}
    others = [f"{p.opts[0]}={given[p.opts[0]]}" for p in needed if p.param_type_name == "option"]
    if param.opts[0] == "--max-age":  # of signatures, for which it takes somebody to trust
        others.append("--trust=first-use")
    return [name, *others, f"{param.opts[0]}={value}", "--", *arguments]


def test_these_are_all_of_them() -> None:
    found = {(name, param.opts[0]) for name, param in options()}
    assert found == {
        *((name, "--poll") for name in ("mirror", "follow", "serve-updates", "serve-adapters", "watch", "status")),
        *((name, "--limit") for name in ("mirror", "push", "pull")),
        *((name, "--object-cache-size") for name in ("apply", "follow")),
        ("gc", "--keep-within"),
        *((name, "--grace") for name in ("gc", "mirror", "follow", "serve-updates", "serve-adapters", "watch")),
        *((name, "--max-age") for name in ("apply", "verify", "mirror", "push", "pull", "follow")),
        *((name, "--max-age") for name in ("serve-updates", "serve-adapters")),
        ("watch", "--settle"),
        ("watch", "--abandon"),
        ("serve-updates", "--timeout"),
        ("serve-adapters", "--timeout"),
    }


@pytest.mark.parametrize(("name", "param"), OPTIONS)
def test_every_form_is_taken_everywhere(
    name: str, param: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in GOOD[param.metavar]:
        assert run(call(name, param, value, tmp_path)) == 6, value  # it was read: what is looked for is not there
        assert f"error: {param.opts[0]}" not in capsys.readouterr().err


@pytest.mark.parametrize(("name", "param"), OPTIONS)
def test_anything_else_is_a_usage_error_that_names_the_forms(
    name: str, param: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in BAD[param.metavar]:
        assert run(call(name, param, value, tmp_path)) == 2, value
        shown = f"error: {param.opts[0]}: found {value!r}, expected {NEED[param.metavar]}\n"
        assert capsys.readouterr() == ("", shown)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("0", 0), ("5", 5), ("0.25", 0.25), ("500ms", 0.5), ("90s", 90), ("1.5m", 90), ("6h", 21_600), ("7d", 604_800)],
)
def test_durations(value: str, seconds: float) -> None:
    assert units.duration(value, "--poll") == seconds
    assert units.whole_seconds(value, "--grace") == -(-seconds // 1)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("7", 7),
        ("7b", 7),
        ("64KB", 64_000),
        ("64kib", 65_536),
        ("1.5 MB", 1_500_000),
        ("16GiB", 16 << 30),
        ("1T", 10**12),
    ],
)
def test_sizes_and_rates(value: str, count: int) -> None:
    assert units.size(value, "--object-cache-size") == count
    assert units.rate(value, "--limit") == units.rate(f"{value}/s", "--limit") == count


@pytest.mark.parametrize("kind", READ)
def test_the_words_name_only_forms_that_are_taken(kind: str) -> None:
    words = NEED[kind].replace("(", " ").replace(")", " ").replace(",", " ").replace(";", " ").split()
    forms = [word for word in words if word[0].isdigit()]
    assert len(forms) >= 4
    for form in forms:
        READ[kind](form, "--option")
    with pytest.raises(UsageError):
        READ[kind]("1 fortnight", "--option")


def test_sizes_rates_and_times() -> None:
    assert [units.size(s, "") for s in ("500", "20GB", "16GiB", "1.5k")] == [500, 20 * 10**9, 16 << 30, 1500]
    assert [units.rate(s, "") for s in ("100MB/s", "12MiB", "5k/s")] == [1e8, 12 << 20, 5e3]
    assert [units.duration(s, "") for s in ("1", "1s", "500ms", "2m", "0.5s")] == [1, 1, 0.5, 120, 0.5]
    for wrong, read in [
        ("", units.size),
        ("0", units.size),
        ("-1", units.rate),
        ("1x", units.rate),
        ("1w", units.duration),
    ]:
        with pytest.raises(UsageError):
            read(wrong, "--option")
