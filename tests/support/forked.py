"""Processes that begin with torch and what the ranks of tests need imported: forks of a server that has imported it,
for a tenth of the processor time of processes that import it each.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess, SpawnProcess
from typing import Any
from unittest import mock

import torch

CONTEXT = multiprocessing.get_context("forkserver")
# The first step of any optimizer imports torch._dynamo, which takes longer than torch itself.
CONTEXT.set_forkserver_preload(["torch._dynamo", "support.ranks", "support.live_ranks"])


def forked(work: Callable[..., None], *args: Any, daemon: bool = False) -> ForkServerProcess:
    """A process for ``work(*args)``, not started yet."""
    # The server has this process's environment, and not its sys.path: what it cannot import it leaves out and says
    # nothing. And torch._dynamo imports triton, which reads then whether it interprets.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    with mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()
    return CONTEXT.Process(target=work, args=args, daemon=daemon)


def fresh(work: Callable[..., None], *args: Any) -> SpawnProcess:
    """The same of an interpreter of its own: no card was looked for in it."""
    return multiprocessing.get_context("spawn").Process(target=work, args=args)
