"""Could a trainer do without a snapshot, and compute the weights before an AdamW step from those after it?

A step of fp32 AdamW is undone from the moments it leaves: of the candidates within a few ULP, those are kept that the
optimizer's own arithmetic takes to the weight that is there. An element is lost if two of them have different bf16
casts, or if none is the true one. One lost element is one too many: the next patch would be made from wrong old values.

    python bench/adamw_inverse.py [--steps 3]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from chain import Batches, loss_of, pretrained

NEAR = 4  # ULP on either side that are tried


def forward(old: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """What torch's AdamW makes of weights, given the moments after the step: the same ops in the same order."""
    step = float(state["step"])
    beta1, beta2 = group["betas"]
    new = old * (1 - group["lr"] * group["weight_decay"])
    denominator = (state["exp_avg_sq"].sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
    return new.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    model, tokenizer = pretrained()
    batches = Batches(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False)
    group = optimizer.param_groups[0]
    print("step    elements  lost in fp32  lost in bf16  forward differs")
    for step in range(1, args.steps + 1):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss_of(model, batches[step]).backward()
        optimizer.step()
        elements = lost = lost_bf16 = odd = 0
        for old, p in zip(before, model.parameters(), strict=True):
            if p.grad is None:
                continue
            state, new = optimizer.state[p], p.detach()
            odd += int((forward(old, state, group) != new).sum())
            estimate = (new.double() + (new.double() - forward(new, state, group).double())).float()
            low = torch.full_like(new, torch.inf)
            high, found = -low, torch.zeros_like(new, dtype=torch.bool)
            candidate = estimate
            for _ in range(NEAR):
                candidate = torch.nextafter(candidate, torch.tensor(-torch.inf))
            for _ in range(2 * NEAR + 1):
                fits = forward(candidate, state, group) == new
                low = torch.where(fits, torch.minimum(low, candidate), low)
                high = torch.where(fits, torch.maximum(high, candidate), high)
                found |= fits & (candidate == old)
                candidate = torch.nextafter(candidate, torch.tensor(torch.inf))
            elements += new.numel()
            lost += int((~found | (low != high)).sum())
            lost_bf16 += int((~found | (low.bfloat16() != high.bfloat16())).sum())
        print(f"{step:4}  {elements:10,}  {lost:12,}  {lost_bf16:12,}  {odd:15,}", flush=True)


if __name__ == "__main__":
    main()
