"""Compile the kernels into one shared library beside their sources; needs a C compiler and nothing else.

    python deltackpt/kernels/build.py

Run at installation, and by hand after a change of a source. Imports nothing of ours: it runs before that is there.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "kernels.so"
FLAGS = ["-std=c11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]


def fingerprint() -> int:
    """crc32 of all sources: a library made from others is not loaded."""
    crc = 0
    for path in sorted(HERE.glob("*.[ch]")):
        crc = zlib.crc32(path.read_bytes(), crc)
    return crc


def build() -> str | None:
    """-> None, or why there is no library."""
    import os  # here, as every start of the library asks for the fingerprint, and none for these
    import shlex
    import shutil
    import subprocess
    import sysconfig
    import tempfile

    wanted = [os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"]
    compilers = [words for c in wanted if c and shutil.which((words := shlex.split(c))[0])]
    if not compilers:
        return "no C compiler"
    if sys.byteorder != "little":
        return "a big-endian machine"
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        made = Path(folder) / LIBRARY.name
        sources = [str(path) for path in sorted(HERE.glob("*.c"))]
        flags = [*FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
        command = [*compilers[0], *flags, f"-DFINGERPRINT={fingerprint()}u", "-o", str(made), *sources]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return done.stderr.strip() or f"{command[0]} failed"
        os.replace(made, LIBRARY)  # never written in place: a running process may have it mapped
    return None


if __name__ == "__main__":
    sys.exit(build())
