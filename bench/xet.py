"""What hf_xet, the transfer library of the Hugging Face Hub, uploads for a checkpoint when the one before is there.

    python bench/xet.py OLD NEW WORK

Its own code: chunks, dedup, compression, xorbs and shards, stored into a folder in WORK in place of the server. Uploads
the shards of OLD, then, in a session of its own, those of NEW, gets these back and compares them. Prints JSON: `bytes`
uploaded for NEW and how many of its bytes were new (`fresh`), seconds to `upload` and to `download`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def upload(files: Sequence[Path], store: Path) -> tuple[list[Any], Any]:
    """-> what the store knows of every file, and what hf_xet counted."""
    import hf_xet

    commit = hf_xet.XetSession().new_upload_commit(endpoint=f"local://{store}")
    items = [commit.start_upload_file(str(path), sha256=hf_xet.SKIP_SHA256) for path in files]
    report = commit.wait_to_finish()
    return [item.result().xet_info for item in items], report.dedup_metrics


def download(infos: Sequence[Any], store: Path, out: Path) -> list[Path]:
    import hf_xet

    paths = [out / str(i) for i in range(len(infos))]
    with hf_xet.XetSession().new_file_download_group(endpoint=f"local://{store}") as group:
        for info, path in zip(infos, paths, strict=True):
            group.start_download_file(info, str(path))
    return paths


def measure(old: Path, new: Path, work: Path) -> dict[str, float]:
    """``old`` and ``new`` are checkpoint directories; ``work`` must not be there, and is removed."""
    shards = sorted(new.glob("*.safetensors"))
    store, out = work / "store", work / "out"
    store.mkdir(parents=True)
    out.mkdir()
    try:
        upload(sorted(old.glob("*.safetensors")), store)
        began = time.perf_counter()
        infos, counted = upload(shards, store)
        uploaded = time.perf_counter()
        back = download(infos, store, out)
        downloaded = time.perf_counter()
        for path, shard in zip(back, shards, strict=True):
            if path.read_bytes() != shard.read_bytes():
                raise SystemExit(f"xet: {shard.name} does not come back")
    finally:
        shutil.rmtree(work)
    return {
        "bytes": counted.total_bytes_uploaded,
        "fresh": counted.new_bytes,
        "upload": uploaded - began,
        "download": downloaded - uploaded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("work", type=Path)
    args = parser.parse_args()
    os.environ["HF_HOME"] = str(args.work / "home")  # its logs go there, not to the user's folder
    print(json.dumps(measure(args.old, args.new, args.work)))


if __name__ == "__main__":
    main()
