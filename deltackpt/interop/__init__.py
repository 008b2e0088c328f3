"""The layouts of other systems: read, written, and told apart by what is in them."""

from deltackpt.interop.convert import convert_steps
from deltackpt.interop.exporter import ExportOptions, ExportResult, export_steps
from deltackpt.interop.formats import FORMATS, READERS, WRITERS, reader, writer
from deltackpt.interop.importer import ImportResult, import_steps

__all__ = [
    "FORMATS",
    "READERS",
    "WRITERS",
    "ExportOptions",
    "ExportResult",
    "ImportResult",
    "convert_steps",
    "export_steps",
    "import_steps",
    "reader",
    "writer",
]
