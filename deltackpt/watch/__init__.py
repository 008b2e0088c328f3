"""Follow a directory into which a trainer saves whole checkpoints, and publish each as a patch, in order, once."""

from deltackpt.watch.follow import Published, Watch
from deltackpt.watch.options import WatchOptions

__all__ = ["Published", "Watch", "WatchOptions"]
