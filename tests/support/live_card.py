"""Cards that are not there: the carrier between cards over Gloo, and the kernels in Triton's interpreter.

To be imported before Triton. With cards of their own, processes take the real ones: `real_cards` says how many.
"""

import torch

from support.interpreted import interpret

if not torch.cuda.is_available():
    interpret()

from deltackpt.carriers import groups
from deltackpt.engines import card as engines_card
from deltackpt.gpu import pipeline


def real_cards() -> int:
    """How many cards this host has."""
    return torch.cuda.device_count()


def stand_in(setattr=setattr, setitem=dict.__setitem__) -> None:
    """In this process: tensors in host memory are taken for those of a card, and NCCL is Gloo."""
    there = groups.PairBackend("nccl", True, groups._gloo, lambda: "")
    setitem(groups.BACKENDS, "nccl", there)
    setattr(engines_card, "has_kernels", lambda device: True)
    setattr(pipeline, "has_kernels", lambda device: True)


def card(number: int) -> torch.device:
    """A card, the last one where there are not so many; the host's memory where there is none."""
    return torch.device("cuda", min(number, real_cards() - 1)) if real_cards() else torch.device("cpu")


def card_engine(out: str, address: str, name: str, phase: str, step: int, how: int, number: int) -> None:
    """A process: an engine on card ``number``, from zeros on, which dies or stops as a phase begins. It notes its step
    and the digest of its weights whenever they change."""
    from pathlib import Path

    from deltackpt.live import join
    from support.live import TOKEN, make_model
    from support.live_ranks import at_phase, digest, note

    torch.set_num_threads(1)
    if not real_cards():
        stand_in()
    else:
        torch.cuda.set_device(card(number))
    model, host, path = make_model(zeros=True).to(card(number)), make_model(zeros=True), Path(out)
    options = {"token": TOKEN, "timeout": 60.0, "engine": name, "rank": (0, 1)}
    receiver = join(model, address, report=at_phase(phase, step, how), **options)
    note(path, step=receiver.step, digest="", way="join")
    while True:
        found = receiver.receive(0.1)
        if found is not None:
            host.load_state_dict(model.state_dict())
            note(path, step=found.step, digest=digest(host), way=found.way)


def card_slices(out: str, address: str, layout: str, rank: int, ranks: int, steps: int) -> None:
    """A process: an engine's rank that holds slices on a card; see `live_ranks.slices`."""
    from support.live_ranks import slices

    stand_in()
    slices(out, address, layout, rank, ranks, steps)


def fsdp_to_card_slices(rank: int, world: int, root: object, layouts: list[str], ranks: int, *, device: str) -> None:
    """A rank of a trainer with FSDP 2, whose engines hold slices on cards."""
    from support.live_ranks import fsdp_to_slices

    stand_in()
    fsdp_to_slices(rank, world, root, "nccl", layouts, ranks, card_slices, device=device)
