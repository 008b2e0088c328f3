"""Versioned JSON records: what the manifest, the edge, the layout and the marker have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deltackpt.errors import FormatError


@dataclass(frozen=True)
class RecordKind:
    """A kind of record: its fields ``format`` and ``version``, its ``name`` in messages, and the error ``code`` for
    JSON that is no such record.
    """

    format: str
    version: int
    name: str
    code: str = "manifest-field"

    def check(self, value: Any, where: str) -> dict[str, Any]:
        """The fields of the record that was parsed. Raises FormatError ``code``, ``version-unknown``."""
        if not isinstance(value, dict) or value.get("format") != self.format:  # [F-MAN-3] [F-LAY-1] [F-EDGE-1]
            need = f'an object of format "{self.format}"'
            raise FormatError(self.code, where=where, have="another kind of JSON", need=need)
        if type(value.get("version")) is not int or value["version"] != self.version:  # [F-VER-2] [F-VER-6]
            raise FormatError(
                "version-unknown",
                where=where,
                have=f"version {value.get('version')!r}"[:80],
                need=f"{self.name} version {self.version}",
                hint="A newer deltackpt reads newer versions.",
            )
        return value


def check_canonical(canonical: bool, where: str) -> None:
    """Refuse a record that is not in the one form: FormatError ``manifest-canonical``."""
    if not canonical:  # [F-JSON-3] [F-MAN-1] [F-EDGE-1] [S-REF-1]
        raise FormatError("manifest-canonical", where=where, have="JSON in another form", need="canonical JSON")
