"""The layouts of other systems: read, written, and told apart by what is in them."""

from deltackpt.interop.bring import ImportResult, bring
from deltackpt.interop.formats import FORMATS, READERS, WRITERS, reader, writer
from deltackpt.interop.give import ExportResult, give

__all__ = ["FORMATS", "READERS", "WRITERS", "ExportResult", "ImportResult", "bring", "give", "reader", "writer"]
