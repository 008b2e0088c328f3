"""The options of the trainer hook, each checked when the hook is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from deltackpt.codecs import parse_choice
from deltackpt.errors import UsageError
from deltackpt.hooks.live import LiveSession, check_live
from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.side import Side
from deltackpt.hooks.training_state import TrainingState
from deltackpt.publish.manifest import AnchorPolicy
from deltackpt.quantize.recipe import Recipe
from deltackpt.repository.refs import check_ref_name
from deltackpt.signing.keys import Signer
from deltackpt.signing.policy import TrustPolicy
from deltackpt.torch_views.adapters import Peft
from deltackpt.torch_views.extract import Cast, Locate
from deltackpt.torch_views.names import Rename
from deltackpt.util.metrics import address
from deltackpt.util.parallel import MOST_THREADS, threads_or_default
from deltackpt.util.places import is_url, url_meant

QUEUE = 2  # steps that may wait to be published
TIMEOUT = 1800.0  # seconds that ranks wait for each other

Resume = Literal["continue", "rewind", "anchor"]
Errors = Literal["raise", "carry"]
Full = Literal["wait", "merge"]
NonFinite = Literal["count", "refuse"]


@dataclass(frozen=True, kw_only=True)
class HookOptions:
    """What `TrainerHook` documents, of the types that it documents.

    Raises UsageError ``hook-option`` for a value that an option does not take, and says what it does take;
    ``encoding-choice`` for an encoding that there is not; ``quantize-option`` and ``quantize-missing`` of a recipe.
    """

    ref: str = "main"
    dtype: Cast = None
    rename: Rename | None = None
    model: torch.nn.Module | None = None
    locate: Locate | None = None
    snapshot: str | os.PathLike[str] = "device"
    full: Full = "wait"
    errors: Errors = "raise"
    queue: int = QUEUE
    peft: Peft | None = None
    resume: Resume = "continue"
    nonfinite: NonFinite = "count"
    quantize: Recipe | str | None = None
    anchor: AnchorPolicy = AnchorPolicy()
    side: Side = None
    encoding: str = "auto"
    shard_bytes: int | None = None
    threads: int | None = None
    on_device: bool | None = None
    sharded: bool | None = None
    timeout: float = TIMEOUT
    metadata: Mapping[str, Any] | None = None
    report: Callable[[StepMetrics], None] | None = None
    metrics_port: int | str | None = None
    sign: str | os.PathLike[str] | Signer | None = None
    trust: str | os.PathLike[str] | TrustPolicy | None = None
    live: LiveSession | None = None
    optimizer: torch.optim.Optimizer | TrainingState | None = None

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_kinds()

    @property
    def cache(self) -> str | os.PathLike[str] | None:
        """The directory of the managed cache that is the snapshot, None if the snapshot is in memory."""
        return None if self.snapshot in ("device", "host") else self.snapshot

    @property
    def recipe(self) -> Recipe | None:
        """What the weights are quantised to."""
        return Recipe.of(self.quantize)

    @property
    def threads_or_default(self) -> int:
        """How many threads compare and encode."""
        return threads_or_default(self.threads)

    def _check_choices(self) -> None:
        _one_of("full", self.full, ("wait", "merge"))
        _one_of("errors", self.errors, ("raise", "carry"))
        _one_of("resume", self.resume, ("continue", "rewind", "anchor"))
        _one_of("peft", self.peft, (None, "merged", "adapter"))
        _one_of("nonfinite", self.nonfinite, ("count", "refuse"))
        _one_of("on_device", self.on_device, (None, True, False))
        _one_of("sharded", self.sharded, (None, True, False))
        parse_choice(self.encoding)
        if isinstance(self.snapshot, str):
            # A word is a mistyped choice rather than a directory; a path has a separator, or is a Path.
            known = self.snapshot in ("device", "host") or "/" in self.snapshot or os.sep in self.snapshot
        else:
            known = isinstance(self.snapshot, os.PathLike)
        if known and self.cache is not None and (is_url(self.cache) or url_meant(os.fspath(self.cache)) is not None):
            known = False
        need = "'device', 'host', or the path of a managed cache"
        require("snapshot", self.snapshot, known, need, "A directory beside the script is Path('name') or './name'.")

    def _check_numbers(self) -> None:
        _whole_number("queue", self.queue, 1)
        if self.shard_bytes is not None:
            _whole_number("shard_bytes", self.shard_bytes, 1, " of bytes, or None")
        if self.threads is not None:
            _whole_number("threads", self.threads, 1, ", or None for one a processor")
            require("threads", self.threads, self.threads <= MOST_THREADS, f"a whole number up to {MOST_THREADS:,}")
        if self.metrics_port is not None:
            port = self.metrics_port
            known = isinstance(port, int | str) and not isinstance(port, bool) and _is_address(port)
            require("metrics_port", port, known, "a port from 0 to 65535, 'HOST:PORT', or None")
        number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        known = number and 0 < self.timeout < 1e9  # what threads can wait
        require("timeout", self.timeout, known, "a number of seconds above 0")

    def _check_kinds(self) -> None:
        require("ref", self.ref, isinstance(self.ref, str), "the name of a ref")
        check_ref_name(self.ref)
        require("dtype", self.dtype, _is_cast(self.dtype), _CAST, _cast_hint(self.dtype))
        known = self.rename is None or isinstance(self.rename, Mapping) or callable(self.rename)
        require("rename", self.rename, known, "{stripped name: name}, a function of a name, or None")
        require("model", self.model, self.model is None or isinstance(self.model, torch.nn.Module), "a module, or None")
        require("locate", self.locate, self.locate is None or callable(self.locate), "a function, or None")
        if (recipe := self.recipe) is not None and recipe.compressed_format is not None:
            _ = recipe.scheme  # raises where its library is missing
        known = self.quantize is None or self.peft != "adapter"
        require("quantize", self.quantize, known, "None beside peft='adapter': an adapter is not quantised")
        need, hint = "an AnchorPolicy", "AnchorPolicy(every=5) stores every fifth step whole."
        require("anchor", self.anchor, isinstance(self.anchor, AnchorPolicy), need, hint)
        known = self.side is None or (isinstance(self.side, Iterable) and not isinstance(self.side, str | bytes))
        require("side", self.side, known, "{path: bytes}, or a list of things that have save_pretrained")
        known = self.metadata is None or isinstance(self.metadata, Mapping)
        require("metadata", self.metadata, known, "a mapping that JSON can hold, or None")
        known = self.sign is None or isinstance(self.sign, str | os.PathLike) or callable(self.sign)
        # Shown by its kind: a key that was given in the place of its path is not to be in any log.
        require("sign", type(self.sign), known, "the path of a key, 'command:…', or None")
        known = self.trust is None or isinstance(self.trust, str | os.PathLike | TrustPolicy)
        require("trust", self.trust, known, "the path of a file of public keys, 'first-use', a TrustPolicy, or None")
        require("report", self.report, self.report is None or callable(self.report), "a function, or None")
        check_live(self.live)
        known = TrainingState.of(self.optimizer) is None or self.full == "wait"
        require("full", self.full, known, "'wait' beside optimizer=: a state is that of one step of the weights")


_CAST = "a floating-point torch.dtype, {name: torch.dtype}, a function, or None"


def _is_cast(dtype: Any) -> bool:
    if isinstance(dtype, torch.dtype):
        return bool(dtype.is_floating_point)
    if isinstance(dtype, Mapping):
        return all(to is None or isinstance(to, torch.dtype) for to in dtype.values())
    return dtype is None or callable(dtype)


def _cast_hint(dtype: Any) -> str:
    known = isinstance(dtype, str) and isinstance(getattr(torch, dtype.removeprefix("torch."), None), torch.dtype)
    return f"dtype=torch.{dtype.removeprefix('torch.')}" if known else ""


def require(name: str, value: object, known: bool, need: str, hint: str = "") -> None:
    """Raise UsageError ``hook-option`` unless the value of an option is one that is ``known``."""
    if not known:
        where = f"the trainer hook, {name}="
        raise UsageError("hook-option", where=where, have=repr(value)[:200], need=need, hint=hint)


def _is_address(port: int | str) -> bool:
    try:
        address(port)
    except UsageError:
        return False
    return True


def _one_of(name: str, value: object, choices: Sequence[object]) -> None:
    known = any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices)
    require(name, value, known, f"one of {', '.join(map(repr, choices))}")


def _whole_number(name: str, value: object, least: int, more: str = "") -> None:
    known = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(name, value, known, f"a whole number from {least} on{more}")


def check_every(every: object) -> None:
    """Raise UsageError ``hook-option`` unless ``every`` is a number of optimizer steps."""
    _whole_number("every", every, 1)
