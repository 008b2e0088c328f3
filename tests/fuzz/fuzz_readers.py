"""Coverage-guided fuzzing of one reader, without end: `make fuzz` runs it for each. Needs atheris.

    python tests/fuzz/fuzz_readers.py TARGET CORPUS [libFuzzer options]

CORPUS is a folder; the vectors, and what earlier runs found, are put there first.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import atheris

sys.path[:0] = [str(p) for p in list(Path(__file__).parents)[:3]]  # tests/fuzz, tests, and the library
with atheris.instrument_imports(include=["deltackpt", "support.fuzz_targets"]):
    from support import fuzz_targets as targets


def main() -> None:
    target, corpus = sys.argv[1], Path(sys.argv[2])
    corpus.mkdir(parents=True, exist_ok=True)
    for kind, data in (*targets.seeds(), *targets.corpus()):
        if kind == target and len(data) <= 4096:
            (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)

    def one(data: bytes) -> None:
        with targets.unchecked():
            targets.run(target, data)

    atheris.Setup([sys.argv[0], str(corpus), *sys.argv[3:]], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
