"""What a command imports, which is what it costs to start: counted, never timed."""

from __future__ import annotations

from support.running import World, deltackpt

HEAVY = ("torch", "numpy", "xxhash", "zstandard", "safetensors", "fsspec", "rich")


def imported(*args: object) -> set[str]:
    """The heavy packages that a call has imported when it ends."""
    watch = "import atexit, sys; atexit.register(lambda: print('imported', *sys.modules, file=sys.stderr))"
    done = deltackpt(*args, before=watch)
    assert done.status == 0
    modules = done.err.splitlines()[-1].split()
    assert {"imported", "deltackpt.errors"} <= {*modules}
    return {name for name in HEAVY if name in modules}


def test_help_imports_nothing_heavy() -> None:
    assert imported("--help") == set()
    assert imported("write", "--help") == set()


def test_no_command_imports_what_it_does_not_need(world: World) -> None:
    assert imported("log", world.repo) & {"torch", "safetensors", "rich", "zstandard"} == set()
    assert imported("diff", *world.steps[:2]) & {"torch", "safetensors", "rich"} == set()
