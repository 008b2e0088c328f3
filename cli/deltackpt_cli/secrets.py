"""What must not be printed, whichever library put it into a message: the last guard of messages and tracebacks."""

from __future__ import annotations

import os
import re

NAMES = re.compile(
    r"TOKEN|SECRET|PASSWORD|CREDENTIAL|ACCESS_KEY|ACCOUNT_KEY|CONNECTION_STRING|API_KEY|SIGN_KEY", re.IGNORECASE
)
SHORTEST = 8  # characters of a value that is taken for a secret: shorter ones are in every text

_IN_URLS = re.compile(
    r"(?<=://)[^/@\s]+:[^/@\s]+(?=@)|(?<=[?&])((?:[\w-]*(?:token|sig|signature|secret|key|password|"
    r"credential))=)[^&\s'\"]+",
    re.IGNORECASE,
)
_PRIVATE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_BEARER = re.compile(r"(?<=Bearer )[^\s'\"]+")
HIDDEN = "***"


def hidden(text: str) -> str:
    """The text without the secrets of the environment, of URLs, and of headers."""
    for value in sorted({v for k, v in os.environ.items() if NAMES.search(k) and len(v) >= SHORTEST}, key=len)[::-1]:
        text = text.replace(value, HIDDEN)
    text = _PRIVATE.sub(HIDDEN, text)
    text = _IN_URLS.sub(lambda found: f"{found[1] or ''}{HIDDEN}", text)
    return _BEARER.sub(HIDDEN, text)
