"""What is asked again and for how long; and what the exceptions of other libraries mean."""

from __future__ import annotations

from typing import Any

import pytest

from deltackpt.errors import DeltackptError, StoreError
from deltackpt.store import translate
from deltackpt.store.retry import Answer, RetryPolicy
from deltackpt.store.translate import Kind


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Http(Exception):
    """An error as httpx, azure and aiohttp have it."""

    def __init__(self, status: int, headers: dict[str, str] | None = None, error_code: str = "") -> None:
        super().__init__("https://host/?X-Signature=secret")
        self.status_code = status
        self.headers = headers or {}
        self.error_code = error_code


def ask(*outcomes: Any, total: float = 60) -> tuple[Any, Clock]:
    clock, left = Clock(), list(outcomes)

    def attempt() -> Any:
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return RetryPolicy(total=total).run("there", attempt, sleep=clock.sleep, clock=clock), clock


def test_pauses_double_and_have_a_limit() -> None:
    found, clock = ask(*[ConnectionResetError()] * 9, "done")
    assert found == "done"
    assert len(clock.slept) == 9
    for slept, longest in zip(clock.slept, (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10), strict=True):
        assert longest / 2 <= slept <= longest


def test_who_waits_long_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ask(*[ConnectionResetError()] * 3, "done")
    assert caplog.messages == []
    ask(*[ConnectionResetError()] * 9, "done")
    assert caplog.messages == ["there: ConnectionResetError; asked again for up to 60 s"]


def test_the_time_in_all_is_kept() -> None:
    clock = Clock()

    def attempt() -> None:
        raise TimeoutError

    with pytest.raises(StoreError) as caught:
        RetryPolicy(total=60).run("there", attempt, sleep=clock.sleep, clock=clock)
    assert caught.value.code == "store-silent"
    assert 45 < clock.now <= 60


def test_the_pause_that_is_asked_for_is_made() -> None:
    assert ask(Http(429, {"Retry-After": "7"}), "done")[1].slept == [7.0]
    assert ask(Http(503, {"retry-after": "0"}), "done")[1].slept == [0.0]
    assert 0.1 <= ask(Http(503, {"Retry-After": "soon"}), "done")[1].slept[0] <= 0.2
    assert ask(Http(503, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}), "done")[1].slept == [0.0]


def test_answers_and_our_own_errors_pass_at_once() -> None:
    for error in (FileNotFoundError(), Http(404), Http(412), Http(416), FileExistsError()):
        with pytest.raises(Answer):
            ask(error)
    ours = StoreError("ours", where="", have="", need="")
    with pytest.raises(DeltackptError, match="ours"):
        ask(ours)
    with pytest.raises(ZeroDivisionError):  # a bug is not dressed up as a fault of the store
        ask(ZeroDivisionError())
    with pytest.raises(KeyboardInterrupt):
        ask(KeyboardInterrupt())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Http(401), Kind.CREDENTIALS),
        (Http(403), Kind.PERMISSION),
        (Http(403, error_code="AuthenticationFailed"), Kind.CREDENTIALS),
        (Http(404, error_code="ContainerNotFound"), Kind.BUCKET),
        (Http(404, {"X-Error-Code": "RepoNotFound"}), Kind.BUCKET),
        (Http(409, error_code="BlobAlreadyExists"), Kind.TAKEN),
        (Http(409, error_code="ConditionalRequestConflict"), Kind.BUSY),
        (Http(413), Kind.QUOTA),
        (Http(418), Kind.REFUSED),
        (PermissionError(), Kind.PERMISSION),
        (OSError("Forbidden: https://host/?secret"), Kind.PERMISSION),
        (ConnectionError("HTTP status client error (401 Unauthorized), domain: https://host/secret"), Kind.CREDENTIALS),
        (BrokenPipeError(), Kind.SILENT),
        (OSError(5, "I/O"), Kind.REFUSED),
        (type("NoCredentialsError", (Exception,), {"__module__": "other"})(), Kind.CREDENTIALS),
        (type("Odd", (Exception,), {"__module__": "other"})(), Kind.REFUSED),
    ],
)
def test_what_exceptions_mean(error: Exception, kind: Kind) -> None:
    fault = translate.fault_of(error, 0)
    assert fault is not None
    assert fault.kind is kind
    assert "secret" not in fault.text


def test_a_cause_says_more_than_what_was_made_of_it() -> None:
    outer = OSError("made of it")
    outer.__cause__ = Http(503, {"Retry-After": "3"}, "SlowDown")
    outer.__cause__.__cause__ = outer  # a ring
    fault = translate.fault_of(outer, 0)
    assert fault is not None
    assert (fault.kind, fault.text, fault.wait) == (Kind.BUSY, "503 SlowDown", 3.0)
