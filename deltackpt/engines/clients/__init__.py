"""Engines as the follower of a host sees them: over HTTP, one class a kind, found by this registry."""

from __future__ import annotations

from importlib import import_module
from urllib.parse import urlsplit

from deltackpt.engines.clients.adapters import AdapterClient
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
    client, url = _named(spec)
    return client(url, options)


def adapter_client(spec: str, timeout: float) -> AdapterClient:
    """The client of an engine's adapters, for ``KIND=URL``; ``timeout`` in seconds. Raises what `client_of` raises."""
    client, url = _named(spec)
    if client.adapters is None:
        raise UsageError("engine-form", where="--engine", have=client.kind, need="an engine whose adapters are served")
    return client.adapters(url, timeout, client.keys)


def _named(spec: str) -> tuple[type[Client], str]:
    """The class of a kind, and the URL."""
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
    return client, url.rstrip("/")


def _names_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or brackets that do not close
        return False


__all__ = ["ENGINES", "AdapterClient", "Client", "ClientOptions", "adapter_client", "client_of"]
