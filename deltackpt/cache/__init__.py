"""A managed cache: two slots and an atomic `current`, moved from step to step in O(changes)."""

from deltackpt.cache.apply import apply_to_cache
from deltackpt.cache.cache import Cache, find_current, open_current

__all__ = ["Cache", "apply_to_cache", "find_current", "open_current"]
