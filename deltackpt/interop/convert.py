"""Convert: steps of one system in the layout of another, by way of a repository that is removed afterwards."""

from __future__ import annotations

import os

from deltackpt.interop.exporter import ExportResult, export_steps
from deltackpt.interop.importer import ImportResult, import_steps
from deltackpt.interop.protocol import LayoutReader, LayoutWriter
from deltackpt.repository import Repository
from deltackpt.util.progress import SILENT, Progress
from deltackpt.util.scratch import temporary_folder


def convert_steps(
    name: str,
    reader: LayoutReader,
    target: str,
    writer: LayoutWriter,
    out: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> tuple[ImportResult, ExportResult]:
    """Read all steps of ``reader``, of the format ``name``, and write them by ``writer``, of the format ``target``.

    ``base`` is the checkpoint that the first step applies to, if that is not whole. Raises what `import_steps` and
    `export_steps` raise; of a format that cannot be read to its end, nothing is written.
    """
    with temporary_folder("convert") as work:
        place = work / "repo"
        read = import_steps(name, reader, place, base=base, threads=threads, progress=progress)
        written = export_steps(Repository.open(place), target, writer, out, threads=threads, progress=progress)
    return read, written
