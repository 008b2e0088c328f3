"""Engines as the follower of a host sees them: over HTTP, one class a kind, found by this registry."""

from __future__ import annotations

from importlib import import_module

from deltackpt.engines.clients.base import Client, ClientOptions
from deltackpt.errors import UsageError

# A kind's module is imported when an engine of it is asked for.
ENGINES: dict[str, str] = {
    "vllm": "deltackpt.engines.vllm.client:VllmClient",
    "sglang": "deltackpt.engines.sglang.client:SglangClient",
}


def client_of(spec: str, options: ClientOptions) -> Client:
    """The client for ``KIND=URL``. Raises UsageError ``engine-form``."""
    kind, _, url = spec.partition("=")
    if kind not in ENGINES or not url.startswith(("http://", "https://")):
        need = " or ".join(f"{kind}=http://HOST:PORT" for kind in ENGINES)
        raise UsageError("engine-form", where="--engine", have=spec[:200], need=need)
    module, _, name = ENGINES[kind].partition(":")
    client: type[Client] = getattr(import_module(module), name)
    return client(url.rstrip("/"), options)


__all__ = ["ENGINES", "Client", "ClientOptions", "client_of"]
