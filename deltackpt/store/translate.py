"""What the exceptions of client libraries mean: the one place where they are translated.

They are told apart by HTTP status, by the service's own error code, and by the names of their classes, so that no
client library needs to be imported to read the errors of another.  Their text is never passed on: it may hold signed
URLs, headers or tokens.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any


class Kind(Enum):
    """What an answer, or the lack of one, means."""

    MISSING = "missing"  # there is no such object
    BUCKET = "bucket"  # there is no such bucket
    TAKEN = "taken"  # the condition of a conditional write does not hold
    RANGE = "range"  # the range begins past the end
    CREDENTIALS = "credentials"
    PERMISSION = "permission"
    QUOTA = "quota"
    BUSY = "busy"  # the service says to come back
    SILENT = "silent"  # no answer, or half of one
    REFUSED = "refused"  # anything else


TRANSIENT = frozenset({Kind.BUSY, Kind.SILENT})

_STATUS = {
    401: Kind.CREDENTIALS,
    402: Kind.QUOTA,
    403: Kind.PERMISSION,
    404: Kind.MISSING,
    412: Kind.TAKEN,
    413: Kind.QUOTA,
    416: Kind.RANGE,
    507: Kind.QUOTA,
    **dict.fromkeys((408, 425, 429, 500, 502, 503, 504), Kind.BUSY),
}
_CODES = {  # of S3, Azure, GCS and the Hub; they say more than the status
    **dict.fromkeys(("NoSuchKey", "BlobNotFound", "EntryNotFound"), Kind.MISSING),
    **dict.fromkeys(("NoSuchBucket", "ContainerNotFound", "RepoNotFound"), Kind.BUCKET),
    **dict.fromkeys(("PreconditionFailed", "ConditionNotMet", "BlobAlreadyExists"), Kind.TAKEN),
    **dict.fromkeys(("InvalidRange",), Kind.RANGE),
    **dict.fromkeys(
        (
            "AuthenticationFailed",
            "ExpiredToken",
            "ExpiredTokenException",
            "InvalidAccessKeyId",
            "InvalidToken",
            "NoAuthenticationInformation",
            "RequestTimeTooSkewed",
            "SignatureDoesNotMatch",
            "TokenRefreshRequired",
        ),
        Kind.CREDENTIALS,
    ),
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "AuthorizationFailure"), Kind.PERMISSION),
    **dict.fromkeys(("QuotaExceeded", "XMinioStorageFull", "InsufficientAccountPermissions"), Kind.QUOTA),
    **dict.fromkeys(
        (
            "ConditionalRequestConflict",
            "InternalError",
            "OperationAborted",
            "RequestTimeout",
            "ServerBusy",
            "ServiceUnavailable",
            "SlowDown",
        ),
        Kind.BUSY,
    ),
}
_CLASSES = {  # by the name of the class or one that it derives from
    **dict.fromkeys(("FileNotFoundError", "NotADirectoryError"), Kind.MISSING),
    **dict.fromkeys(("EntryNotFoundError", "XetObjectNotFoundError"), Kind.MISSING),
    "FileExistsError": Kind.TAKEN,
    **dict.fromkeys(
        (
            "ClientAuthenticationError",
            "DefaultCredentialsError",
            "LocalTokenNotFoundError",
            "NoCredentialsError",
            "PartialCredentialsError",
            "RefreshError",
            "TokenRetrievalError",
            "XetAuthenticationError",
        ),
        Kind.CREDENTIALS,
    ),
    "PermissionError": Kind.PERMISSION,
    **dict.fromkeys(
        (
            "ClientConnectionError",
            "ClientPayloadError",
            "ConnectionError",
            "FlexibleChecksumError",  # damaged in transit
            "HTTPClientError",
            "IncompleteReadError",
            "ResponseStreamingError",
            "ServiceRequestError",
            "ServiceResponseError",
            "Timeout",
            "TimeoutError",
            "TimeoutException",
            "TransportError",
        ),
        Kind.SILENT,
    ),
}
_CODE = re.compile(r"[A-Za-z0-9._-]{1,60}")
_REQWEST = re.compile(r"HTTP status (?:client|server) error \((\d{3})\b")  # all that hf_xet says of a status
_FORBIDDEN = re.compile(r"Forbidden\b")  # gcsfs makes a bare OSError of a 403
# Classes of Python's own for settings and answers that cannot be read, by the libraries or by what is made of
# their answers here, and of what a library cannot do: a NotImplementedError is a RuntimeError. All others are our bugs.
_UNEXPECTED = (ValueError, LookupError, TypeError, AttributeError, EOFError, RuntimeError)
_FIELD = re.compile(r"[A-Za-z]{1,32}")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True)
class Fault:
    """``text`` is safe to print; ``wait``: seconds before the next request if the service asks for a pause."""

    kind: Kind
    text: str
    wait: float | None = None


def fault_of(error: Exception, now: float) -> Fault | None:
    """What an exception means, None if it is not of a store: a bug of ours, which must not be hidden.

    The text of one that has nothing but its class names the place in the code where it was raised.
    """
    status, code, wait, kind, name = None, "", None, None, type(error).__name__
    for cause in _causes(error):
        names = [cls.__name__ for cls in type(cause).__mro__]
        found = next((_CLASSES[name] for name in names if name in _CLASSES), None)
        # fsspec says "no such file" of a web server that it did not reach; what that was raised from knows better.
        answered = _status(cause) not in (None, 404, 410, *_STATUS) and not _code(cause)
        if kind is Kind.MISSING and (found is Kind.SILENT or answered):
            kind, name = found or Kind.REFUSED, type(cause).__name__
        kind = kind or found
        if isinstance(cause, OSError) and cause.errno in _FULL:
            kind = Kind.QUOTA
        status = status or _status(cause)
        code = code or _code(cause)
        wait = wait if wait is not None else _wait(_headers(cause), now)
    kind = _CODES.get(code) or _STATUS.get(status or 0) or kind
    unexpected = (
        kind is None and status is None and type(error).__module__ == "builtins" and not isinstance(error, OSError)
    )
    if unexpected and not isinstance(error, _UNEXPECTED):
        return None
    if status is None and kind is None and _FORBIDDEN.match(str(error)):
        status, kind = 403, Kind.PERMISSION
    text = " ".join(str(word) for word in (status, code or name) if word)
    if unexpected:
        text += _place(error)
    return Fault(kind or Kind.REFUSED, text, wait)


def status(error: BaseException) -> int | None:
    """The HTTP status of an exception."""
    return next((found for cause in _causes(error) if (found := _status(cause)) is not None), None)


def damaged(error: BaseException) -> bool:
    """Whether a client library found that bytes are not those that were sent."""
    return any(type(cause).__name__ == "FlexibleChecksumError" for cause in _causes(error))


def _place(error: BaseException) -> str:
    """The module and line that raised it; its text may hold anything. Of a field that an answer lacks, its name."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    module = str(trace.tb_frame.f_globals.get("__name__"))
    field = str(error.args[0]) if isinstance(error, KeyError) and error.args else ""
    lacks = f", an answer without {field}," if module.startswith("deltackpt.") and _FIELD.fullmatch(field) else ""
    return f"{lacks} at {module}:{trace.tb_lineno}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):  # a chain may be a ring
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        return _number(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    for holder, name in ((response, "status_code"), (error, "status_code"), (error, "status"), (error, "code")):
        if (status := _number(getattr(holder, name, None))) is not None:
            return status
    found = _REQWEST.search(str(error))
    return int(found[1]) if found else None


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        found: Any = response.get("Error", {}).get("Code")
    else:
        found = getattr(error, "error_code", None) or _headers(error).get("x-error-code")
    found = getattr(found, "value", found)
    return found if isinstance(found, str) and _CODE.fullmatch(found) and not found.isdigit() else ""


def _headers(error: BaseException) -> dict[str, str]:
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        headers: Any = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
    return {str(k).lower(): str(v) for k, v in headers.items()} if hasattr(headers, "items") else {}


def _wait(headers: Mapping[str, str], now: float) -> float | None:
    """Retry-After: seconds, or a date."""
    value = headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now) if value else None
    except (ValueError, TypeError, OverflowError):
        return None


def _number(value: object) -> int | None:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    return value if isinstance(value, int) and 100 <= value <= 599 else None
