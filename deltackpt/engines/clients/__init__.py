"""Engines as the follower of a host sees them: over HTTP, one class a kind, found by this registry."""

from __future__ import annotations

from importlib import import_module
from urllib.parse import urlsplit

from deltackpt.engines.clients.base import Client, ClientOptions
from deltackpt.errors import UsageError

# A kind's module is imported when an engine of it is asked for.
ENGINES: dict[str, str] = {
    "vllm": "deltackpt.engines.vllm.client:VllmClient",
    "sglang": "deltackpt.engines.sglang.client:SglangClient",
}


def client_of(spec: str, options: ClientOptions) -> Client:
    """The client for ``KIND=URL``. Raises UsageError ``engine-form``, also for a URL that may hold a secret: what is
    named on a command line is seen by every user of the host, and in every event."""
    kind, _, url = spec.partition("=")
    need = " or ".join(f"{kind}=http://HOST:PORT" for kind in ENGINES)
    if any(sign in url for sign in "@?#"):
        hint = "A key goes into the environment: DELTACKPT_ENGINE_KEY, or what the engine itself reads."
        have = "a URL with a user, a query or a fragment, which is not shown"
        raise UsageError("engine-form", where="--engine", have=have, need=need, hint=hint)
    if kind not in ENGINES or not url.startswith(("http://", "https://")) or not _names_a_host(url):
        raise UsageError("engine-form", where="--engine", have=spec[:200], need=need)
    module, _, name = ENGINES[kind].partition(":")
    client: type[Client] = getattr(import_module(module), name)
    return client(url.rstrip("/"), options)


def _names_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or brackets that do not close
        return False


__all__ = ["ENGINES", "Client", "ClientOptions", "client_of"]
