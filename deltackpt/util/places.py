"""Paths that look like URLs: a typo would otherwise make a folder of that name, and everything would seem to work."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from deltackpt.errors import UsageError

SCHEMES: Final = (
    *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "hf+s3", "file", "memory"),
    *("http", "https", "ftp", "sftp", "ssh", "hdfs", "r2", "oss", "cos"),
)

_KNOWN: Final = "|".join(re.escape(scheme) for scheme in SCHEMES)
# `s3:/bucket` and what Path makes of a URL, for any scheme; `s3:bucket`, `s3//bucket` and `s3;//bucket` for known ones.
_MISTYPED: Final = re.compile(
    rf"(?P<any>[a-z][a-z0-9+.-]+):/(?!/)|(?P<colon>{_KNOWN}):(?!//)|(?P<slashes>{_KNOWN})[^a-z0-9:/]{{0,2}}//",
    re.IGNORECASE,
)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Does it begin with a scheme, as a URL does and a path of ours never?"""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", os.fspath(path)) is not None


def url_meant(text: str) -> str | None:
    """The URL that a path was probably meant to be, None for a path that looks like none."""
    found = _MISTYPED.match(text)
    if found is None:
        return None
    return f"{(found['any'] or found['colon'] or found['slashes']).lower()}://{text[found.end() :].lstrip('/')}"


def shown(url: str) -> str:
    """A URL for a message: without what stands behind its scheme where that may hold a secret."""
    return f"{url.partition('://')[0]}://…" if "@" in url or "?" in url else url


def check_url(text: str) -> None:
    """Refuse what is to be a repository's path and looks like a mistyped URL: UsageError ``store-scheme``."""
    if (meant := url_meant(text)) is not None:
        have = f"what looks like a URL ({meant.partition('://')[0]}), without ://"
        hint = (
            "A folder whose name is like that is written as ./NAME; a URL is given as text, since Path drops a slash."
        )
        raise UsageError("store-scheme", where="store URL", have=have, need=f"a path, or {shown(meant)}", hint=hint)


def check_local(path: str | os.PathLike[str], what: str) -> None:
    """Refuse a URL, mistyped or not, for ``what`` has to be a local folder: UsageError ``usage``."""
    text = os.fspath(path)
    url = text if is_url(text) else url_meant(text)
    if url is not None:
        hint = "A folder whose name is like that is written as ./NAME."
        raise UsageError("usage", where=what, have=f"a URL, {shown(url)}", need="a local folder", hint=hint)


def expanded(given: str) -> Path:
    """A path whose ``~`` is the home of a user; as it is where there is no such user, so that it is not found."""
    try:
        return Path(given).expanduser()
    except RuntimeError:
        return Path(given)
