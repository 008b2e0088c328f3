"""Every figure that deltackpt promises, measured, in one table: ratios first, what they are ratios of beside them.

    python bench/run.py [--quick] [--only GROUP ...] [--work DIR] [--keep]

A machine is noisy, so a candidate and its baseline take turns, and the median of the turns counts. Both find their
files in the page cache. Real chains are trained by bench/chain.py, the 1.2 GB model is bench/synth.py's.
All that is written goes below the work folder; about 20 GB, removed at the end.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import run_sizes
import run_times
from rows import Row, machine, say, table
from work import Work

HERE = Path(__file__).parent


GROUPS: dict[str, Callable[[Work], Iterator[Row]]] = {
    "size": run_sizes.size,
    "chains": run_sizes.chains,
    "fp32": run_sizes.fp32,
    "write": run_times.write_base,
    "cache": run_times.write_cache,
    "apply": run_times.apply_cache,
    "cold": run_times.apply_cold,
    "memory": run_times.memory,
    "digest": run_times.digests,
    "log": run_times.log,
    "start": run_times.start,
}


def measure(work: Work, names: Iterable[str]) -> list[Row]:
    """The rows of the groups; one that cannot be measured is a row too, and the others go on."""
    rows: list[Row] = []
    for name in names:
        say(name)
        try:
            found = list(GROUPS[name](work))
        except Exception as error:
            text = " ".join(str(error).split())[:160]
            found = [Row(f"{name}: not measured", None, "", f"{type(error).__name__}: {text}", 0)]
        for row in found:  # so that a run that is stopped has told something
            say(" | ".join((*row.cells(), row.detail)))
        rows += found
    ratios = [row for row in rows if row.unit == "x"]
    return ratios + [row for row in rows if row.unit != "x"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models and short chains: does it run, not how fast")
    parser.add_argument("--only", action="append", choices=GROUPS, metavar="GROUP", help=f"one of: {', '.join(GROUPS)}")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="where the files go")
    parser.add_argument("--keep", action="store_true", help="leave them there, and train no chain again the next time")
    args = parser.parse_args()
    root = args.work.resolve() / "deltackpt-bench"  # a folder of its own: it is emptied without asking
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free / 1e9
    if not args.quick and free < 22:
        raise SystemExit(
            f"the work folder has {free:.0f} GB free, and needs 22\n\nhint: give another with --work, or use --quick"
        )
    facts = machine()
    groups = args.only or list(GROUPS)
    try:
        rows = measure(Work(root, args.quick, groups), groups)
    finally:
        if not args.keep:
            shutil.rmtree(root)
    print(table(rows))
    promised = [row for row in rows if row.required is not None]
    reached = sum(row.verdict == "ok" for row in promised)
    print(f"\n{reached} of {len(promised)} figures reached; {facts}")
    if args.quick:
        print("quick: sizes too small for the figures to count")


if __name__ == "__main__":
    main()
