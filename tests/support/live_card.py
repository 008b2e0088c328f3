"""Cards that are not there: the carrier between cards over Gloo, and the kernels in Triton's interpreter.

To be imported before Triton. With cards of their own, processes take the real ones: `real_cards` says how many.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # is read when triton is imported

from deltackpt.carriers import groups
from deltackpt.engines import card
from deltackpt.gpu import pipeline


def real_cards() -> int:
    """How many cards this host has."""
    return torch.cuda.device_count()


def stand_in(setattr=setattr, setitem=dict.__setitem__) -> None:
    """In this process: tensors in host memory are taken for those of a card, and NCCL is Gloo."""
    there = groups.PairBackend("nccl", True, groups._gloo, lambda: "")
    setitem(groups.BACKENDS, "nccl", there)
    setattr(card, "has_kernels", lambda device: True)
    setattr(pipeline, "has_kernels", lambda device: True)
