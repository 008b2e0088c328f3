"""deltackpt: weights in motion, every training step as a tiny, bit-exact patch.

What a user needs is here; each name is imported when it is first used, and only `TrainerHook` needs torch.

    import deltackpt

    deltackpt.write("step_12", "runs/repo")                    # a checkpoint directory becomes the next step
    deltackpt.apply("runs/repo", "restored", 12)               # a step becomes a checkpoint directory
    deltackpt.apply_to_cache("runs/repo", "/var/cache/rollout")  # a directory that moves from step to step
    deltackpt.verify("runs/repo").ok                           # every object, every chain, every step
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from deltackpt import errors
    from deltackpt.api import apply, apply_to_cache, compact, diff, follow, gc, mirror, verify, write
    from deltackpt.cache import Cache
    from deltackpt.hooks import TrainerHook
    from deltackpt.repository import Repository

__all__ = [
    "Cache",
    "Repository",
    "TrainerHook",
    "__version__",
    "apply",
    "apply_to_cache",
    "compact",
    "diff",
    "errors",
    "follow",
    "gc",
    "mirror",
    "verify",
    "write",
]

# help() and `import *` ask for every name. To ask for this one by name still tells what to install.
if not TYPE_CHECKING and find_spec("torch") is None:
    __all__.remove("TrainerHook")

_HOME = {"Cache": "deltackpt.cache", "Repository": "deltackpt.repository", "TrainerHook": "deltackpt.hooks"}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("deltackpt.errors")
    if name not in __all__ and name not in _HOME:
        raise AttributeError(f"module 'deltackpt' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOME.get(name, "deltackpt.api")), name)
    return found


def __dir__() -> list[str]:
    return __all__
