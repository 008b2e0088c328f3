"""A process without the compiled kernels says so once, with what to do; one that chose numpy says nothing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.running import python_path

from deltackpt import kernels
from deltackpt.kernels import build

ROOT = Path(build.__file__).parents[2]
COMMAND = "from deltackpt_cli.app import main; main()"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the library that was installed where there was no compiler."""
    shutil.copytree(ROOT / "deltackpt", tmp_path / "deltackpt", ignore=shutil.ignore_patterns("kernels.so"))
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Run:
    """Run a script in a process of its own on that copy."""

    def process(script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value for name, value in os.environ.items() if name not in ("DELTACKPT_KERNELS", "PYTHONWARNINGS")
        }
        return subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=folder,
            env={**kept, "PYTHONPATH": python_path(folder, ROOT / "cli"), **more},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return process


def test_a_fallback_warns_once_and_says_what_to_install(run: Run, folder: Path) -> None:
    script = "import deltackpt.codecs, deltackpt.kernels as k; print(k.LIB, k.status())"
    done = run(script)
    library = folder / "deltackpt" / "kernels" / "kernels.so"
    assert (done.returncode, done.stdout) == (0, f"None numpy (there is no {library})\n")
    assert done.stderr.count("RuntimeWarning") == 1
    assert "Install a C compiler (gcc or clang) and run: python " in done.stderr
    assert "RuntimeWarning: deltackpt works in numpy" in run(script, PYTHONWARNINGS="error").stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_what_it_says_to_run_is_enough(run: Run) -> None:
    said = run("import deltackpt.kernels").stderr
    script = said.partition("run: python ")[2].partition(" (")[0]
    subprocess.run([sys.executable, script], check=True, env={**os.environ, "CFLAGS": "-O0"})
    done = run("import deltackpt.kernels as k; print(k.status())")
    assert (done.stdout, done.stderr) == ("compiled\n", "")


def test_numpy_by_choice_is_no_fallback(run: Run) -> None:
    done = run("import deltackpt.kernels as k; print(k.status())", DELTACKPT_KERNELS="0", PYTHONWARNINGS="error")
    assert (done.stdout, done.stderr) == ("numpy (DELTACKPT_KERNELS=0)\n", "")


def test_a_library_that_cannot_be_loaded_says_why(run: Run, folder: Path) -> None:
    library = folder / "deltackpt" / "kernels" / "kernels.so"
    library.write_bytes(b"no library")
    assert run("import deltackpt.kernels as k; print(k.status())").stdout.startswith(f"numpy ({library}: ")


@pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")
def test_a_library_of_other_sources_is_told(run: Run, folder: Path) -> None:
    shutil.copy(build.LIBRARY, folder / "deltackpt" / "kernels")
    with (folder / "deltackpt" / "kernels" / "diff.c").open("a") as file:
        file.write("/* changed */\n")
    done = run("import deltackpt.kernels as k; print(k.status())")
    assert "was made from other sources" in done.stdout
    assert done.stderr.count("RuntimeWarning") == 1


def test_the_command_tells_the_version_the_kernels_and_notes_a_fallback(run: Run, folder: Path) -> None:
    done = run(COMMAND, "--version")
    version, of_kernels = done.stdout.splitlines()
    assert version.split()[0] == "deltackpt"
    assert of_kernels.startswith("kernels: numpy (there is no ")
    assert done.stderr.startswith("note: deltackpt works in numpy, several times slower")
    assert len(done.stderr.splitlines()) == 1
    done = run(COMMAND, "doctor", str(folder / "store"), "--quiet")
    assert done.stdout.splitlines()[-1] == of_kernels
    assert done.stderr == ""
    done = run(COMMAND, "--version", DELTACKPT_KERNELS="0")
    assert done.stdout.splitlines()[1] == "kernels: numpy (DELTACKPT_KERNELS=0)"
    assert done.stderr == ""
