"""Adapters of running engines: every published step under a name of its own, the old ones until they are idle."""

from deltackpt.engines.adapters.serving import Adapter, AdapterOptions, AdapterServing

__all__ = ["Adapter", "AdapterOptions", "AdapterServing"]
