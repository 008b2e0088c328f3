"""Tables of a card's decoder, compared."""

from dataclasses import fields

import torch

from deltackpt.gpu.transfers import Sent


def check_same(one, other):
    """Field by field; what is on its way to a card is not looked at."""
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b), field.name
        elif not isinstance(a, Sent):
            assert a == b, field.name
