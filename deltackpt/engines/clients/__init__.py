"""Engines as the host's follower sees them: over HTTP, one file a kind."""

from __future__ import annotations

from deltackpt.engines.clients.base import Client, Host
from deltackpt.engines.sglang.client import SglangClient
from deltackpt.engines.vllm.client import VllmClient
from deltackpt.errors import UsageError

_KINDS: dict[str, type[Client]] = {"vllm": VllmClient, "sglang": SglangClient}


def client_of(spec: str, host: Host) -> Client:
    """The client for ``KIND=URL``. Raises UsageError ``engine-form``."""
    kind, _, url = spec.partition("=")
    if kind not in _KINDS or not url.startswith(("http://", "https://")):
        need = " or ".join(f"{kind}=http://HOST:PORT" for kind in _KINDS)
        raise UsageError("engine-form", where="--engine", have=spec[:200], need=need)
    return _KINDS[kind](url.rstrip("/"), host)


__all__ = ["Client", "Host", "SglangClient", "VllmClient", "client_of"]
