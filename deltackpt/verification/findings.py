"""What was checked and what was found: no check stops at the first error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from deltackpt.errors import DeltackptError
from deltackpt.format.safetensors_header import Tensor
from deltackpt.util.parallel import ordered_map

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One defect: the fields of the error that a reader would meet."""

    code: str
    exit_code: int
    where: str
    have: str
    need: str
    hint: str

    @classmethod
    def of(cls, error: DeltackptError) -> Finding:
        """What an error says."""
        return cls(error.code, error.exit_code, error.where, error.have, error.need, error.hint)


def exit_code(findings: Iterable[Finding]) -> int:
    """0, or the lowest exit code found: bad bytes come before a chain that does not fit, and so on. As for a reader of
    the step, a chain that is broken since an object is missing counts as a missing object."""
    found = {f.code: f.exit_code for f in findings}
    if "object-missing" in found:
        found.pop("chain-broken", None)
    return min(found.values(), default=0)


@dataclass(frozen=True)
class VerifyReport:
    """What was checked, by kind, and what was found."""

    target: str
    checked: dict[str, int]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    @property
    def exit_code(self) -> int:
        """`exit_code` of the findings."""
        return exit_code(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        findings = [asdict(f) for f in self.findings]
        return {"target": self.target, "ok": self.ok, "checked": dict(self.checked), "findings": findings}


@dataclass
class Findings:
    """Collects; no check stops at the first error."""

    target: str
    checked: Counter[str] = field(default_factory=Counter)
    found: dict[Finding, None] = field(default_factory=dict)

    def add(self, error: DeltackptError) -> None:
        """Collect an error; the same one counts once."""
        self.found[Finding.of(error)] = None

    def attempt(self, kind: str, work: Callable[..., T], *arguments: Any) -> T | None:
        """Count one check. An error of ours becomes a finding and None."""
        self.checked[kind] += 1
        try:
            return work(*arguments)
        except DeltackptError as error:
            self.add(error)
            return None

    def each(self, kind: str, work: Callable[[T], None], items: Iterable[T], threads: int) -> None:
        """The same for many, over threads."""

        def one(item: T) -> DeltackptError | None:
            try:
                work(item)
            except DeltackptError as error:
                return error
            return None

        for error in ordered_map(one, items, threads):
            self.checked[kind] += 1
            if error is not None:
                self.add(error)

    def each_run(
        self,
        kind: str,
        runs: Iterable[list[Tensor]],
        at_once: Callable[[list[Tensor]], bool],
        rest: Iterable[str],
        one: Callable[[str], None],
        threads: int,
    ) -> None:
        """The same for many tensors, which are found well a run ``at_once``, or else one by one, by name; and for the
        ``rest`` of them, one by one. Errors are collected in the order of the names."""
        found: list[tuple[str, DeltackptError]] = []

        def check(names: list[str]) -> int:
            for name in names:
                try:
                    one(name)
                except DeltackptError as error:
                    found.append((name, error))
            return len(names)

        def check_run(run: list[Tensor]) -> int:
            return len(run) if len(run) > 1 and at_once(run) else check([tensor.name for tensor in run])

        self.checked[kind] += sum(ordered_map(check_run, runs, threads))
        self.checked[kind] += sum(ordered_map(lambda name: check([name]), rest, threads))
        for _, error in sorted(found, key=lambda item: item[0]):
            self.add(error)

    def report(self) -> VerifyReport:
        """What was collected so far."""
        return VerifyReport(self.target, dict(self.checked), tuple(self.found))
