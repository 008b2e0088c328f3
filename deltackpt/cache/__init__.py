"""A managed cache: two slots and an atomic `current`, moved from step to step in O(changes)."""

from deltackpt.cache.cache import Cache, apply_to_cache, open_current

__all__ = ["Cache", "apply_to_cache", "open_current"]
