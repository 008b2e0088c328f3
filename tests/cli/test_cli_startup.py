"""What a command imports, which is what it costs to start: counted, never timed."""

from __future__ import annotations

from conftest import World, deltackpt

HEAVY = ("torch", "numpy", "xxhash", "zstandard", "safetensors", "fsspec", "rich")


def imported(*args: object) -> set[str]:
    """The heavy packages that a call has imported when it ends."""
    watch = "import atexit, sys; atexit.register(lambda: print('imported', *sys.modules, file=sys.stderr))"
    done = deltackpt(*args, before=watch)
    assert done.status == 0
    modules = done.err.splitlines()[-1].split()
    assert modules[0] == "imported" and "deltackpt" in modules
    return {name for name in HEAVY if name in modules}


def test_help_and_completion_import_nothing_heavy() -> None:
    assert imported("--help") == set()
    assert imported("write", "--help") == set()


def test_no_command_imports_torch(world: World) -> None:
    for args in (["log", world.repo], ["inspect", world.repo], ["diff", *world.steps[:2]], ["verify", world.repo]):
        assert imported(*args) & {"torch", "safetensors", "rich"} == set()
