"""What a screen shows of a run as it goes on: the head, the rate, and how far each reader and engine is behind."""

from __future__ import annotations

import http.client
import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deltackpt.errors import DeltackptError, NotFoundError, StoreError, UsageError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.repository.leases import read_leases
from deltackpt.sync.backoff import explained
from deltackpt.util.answers import in_time, read_whole

RECENT = 20  # steps that a rate is taken over
FAR = 1000  # steps back from the head in which a reader is looked for
PATIENCE = 2.0  # seconds for an answer of a page of metrics
MAX_METRICS = 1 << 20

_SAMPLE = re.compile(r'(deltackpt_[a-z_]+)(?:\{(?:[a-z_]+="(?:[^"\\]|\\.)*",?)*\})? (\S+)')
_ENGINE = re.compile(r'[{,]engine="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class LiveReader:
    """A holder of a lease, or a follower or engine of a page of metrics. ``step`` is where it is, ``behind`` counts the
    steps to the head, ``lag`` is in seconds; each None where it is not told. ``wrong`` is what it needs help with."""

    name: str
    step: int | None
    behind: int | None
    lag: float | None
    wrong: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class LiveStatus:
    """One look. ``age``: seconds since the head was published; ``per_hour``: steps, and ``bytes_per_step`` of patches,
    over the last RECENT steps; ``errors`` is what could not be asked, in words."""

    now: float
    step: int | None
    id: str | None
    age: float | None
    per_hour: float | None
    bytes_per_step: float | None
    readers: tuple[LiveReader, ...]
    errors: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


class LiveView:
    """Looks at a branch again and again, each time at what may have changed alone."""

    def __init__(self, repo: Repository, ref: str = "main", metrics: Sequence[str] = ()) -> None:
        """``metrics``: URLs of pages of metrics, as `--metrics-port` serves them. Raises UsageError ``usage``."""
        for url in metrics:
            if not re.match(r"https?://[^/]", url):
                raise UsageError("usage", where="--metrics", have=repr(url)[:80], need="http://HOST:PORT/metrics")
        self._repo, self._ref, self._urls = repo, ref, list(metrics)
        self._chain: list[Link] = []  # newest first

    def look(self) -> LiveStatus:
        """What is there now. A store or page that does not answer is told in ``errors``; raises what `explained` finds:
        another repository in its place.
        """
        errors: list[str] = []
        readers: list[LiveReader] = []
        head = rate = published = None
        try:
            if (ref := self._repo.ref(self._ref)) is None:
                raise self._repo.absent(self._ref)
            published = self._repo.load(ref.link).time
            self._follow(head := ref.link)
            rate = self._rate()
            readers += self._leases()
        except DeltackptError as found:
            error = explained(self._repo, found)
            if not isinstance(error, StoreError | NotFoundError):
                raise error from found
            errors.append(error.sentence())
        for url in self._urls:
            try:
                readers += self._scraped(url, head)
            except (OSError, ValueError, http.client.HTTPException) as failure:
                errors.append(f"{url}: {_said(failure)}")
        now = time.time()
        return LiveStatus(
            now=now,
            step=head.step if head else None,
            id=head.id if head else None,
            age=None if published is None else max(0.0, now - published),
            per_hour=rate[0] if rate else None,
            bytes_per_step=rate[1] if rate else None,
            readers=tuple(readers),
            errors=tuple(errors),
        )

    def _follow(self, head: Link) -> None:
        """The newest steps of the chain, of which only those that are new are loaded."""
        new: list[Link] = []
        link: Link | None = head
        while link is not None and len(new) < RECENT and link not in self._chain[:1]:
            new.append(link)
            link = self._parent(link)
        known = self._chain if link is not None and link in self._chain[:1] else []
        self._chain = [*new, *known][:FAR]

    def _parent(self, link: Link) -> Link | None:
        try:
            return self._repo.load(link).parent
        except NotFoundError:  # collected
            return None

    def _rate(self) -> tuple[float, float] | None:
        steps = [self._repo.load(link) for link in self._chain[:RECENT]]
        if len(steps) < 2 or steps[0].time <= steps[-1].time:
            return None
        patches = [sum(f.size for f in step.patch) for step in steps if step.patch is not None]
        hours = (steps[0].time - steps[-1].time) / 3600
        return (len(steps) - 1) / hours, sum(patches) / max(1, len(patches))

    def _behind(self, link: Link) -> int | None:
        """Steps from ``link`` to the head; the chain is read back as far as that takes, FAR steps at most."""
        while link not in self._chain and self._chain and len(self._chain) < FAR and self._chain[-1].step > link.step:
            if (before := self._parent(self._chain[-1])) is None:
                break
            self._chain.append(before)
        return self._chain.index(link) if link in self._chain else None

    def _leases(self) -> Iterator[LiveReader]:
        now = self._repo.store.now()
        for lease in read_leases(self._repo):
            if lease.expires > now and (link := lease.have or lease.link) is not None:
                behind = self._behind(link)
                lag = None
                if behind is not None:
                    lag = 0.0 if not behind else max(0.0, now - self._repo.load(self._chain[behind - 1]).time)
                yield LiveReader(f"lease of {lease.holder}", link.step, behind, lag, "")

    def _scraped(self, url: str, head: Link | None) -> Iterator[LiveReader]:
        with urllib.request.build_opener(*in_time()).open(url, timeout=PATIENCE) as answer:
            body = read_whole(answer, MAX_METRICS, PATIENCE).decode("utf-8", "replace")
        found: dict[str, dict[str, float]] = {}
        for line in body.splitlines():
            if (sample := _SAMPLE.fullmatch(line.strip())) is not None:
                engine = _ENGINE.search(line)
                name = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], engine[1]) if engine else url
                values, value = found.setdefault(name, {}), float(sample[2])
                if math.isfinite(value):
                    values[sample[1]] = value
                elif sample[1] == "deltackpt_step":
                    raise ValueError(f"{sample[1]} is {sample[2][:20]}")
        if not found:
            raise ValueError("no metrics of deltackpt are there")
        for name, values in found.items():
            step = values.get("deltackpt_step")
            wrong = ["wedged"] * bool(values.get("deltackpt_wedged"))
            if failures := values.get("deltackpt_failures_total"):
                wrong.append(f"{failures:,.0f} failures")
            if (unseen := values.get("deltackpt_unseen_seconds", 0.0)) > 60:
                wrong.append(f"the repository was not seen for {unseen:,.0f} s")
            lag = values.get("deltackpt_behind_seconds", values.get("deltackpt_lag_seconds"))
            number = None if step is None else int(step)
            at = next((i for i, link in enumerate(self._chain) if link.step == number), None)
            yield LiveReader(name, number, at if head else None, lag, ", ".join(wrong))


def _said(failure: Exception) -> object:
    """What is behind an error of urllib, which is the reason alone where no answer came."""
    if isinstance(failure, urllib.error.URLError) and not isinstance(failure, urllib.error.HTTPError):
        return failure.reason
    return failure if str(failure) else type(failure).__name__
