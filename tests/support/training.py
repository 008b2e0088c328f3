"""Small trainings for the tests of the hooks, and what each step has to restore to."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.verification import verify_repository


class Net(torch.nn.Module):
    """Two tied weights, a persistent buffer and one that is not, and a scalar."""

    def __init__(self, width: int = 96, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(200, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 200, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(self.norm(hidden)) * self.scale


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    tokens = torch.randint(0, 200, (8, 12), generator=torch.Generator().manual_seed(seed))
    tokens = tokens.to(next(model.parameters()).device)
    logits = model(tokens)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    inner = getattr(model, "module", model)
    inner.seen += 1


def published(model: torch.nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> dict[str, torch.Tensor]:
    """What a full checkpoint of the model holds."""
    state = {k: v.detach().clone() for k, v in model.state_dict().items() if k != "head.weight"}
    if dtype is not None:
        state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    return state


def exact_copy(tensor: torch.Tensor) -> torch.Tensor:
    """By bytes: a clone of bools would make them 0 and 1."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone().view(tensor.dtype).reshape(tensor.shape)


def raw(state: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor down to its bytes."""
    return {
        name: (
            str(t.dtype),
            tuple(t.shape),
            t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, t in state.items()
    }


class Ledger:
    """Full checkpoints saved beside the patches, and the comparison of each with what the repository restores."""

    def __init__(self, root: Path, repo: Path | str) -> None:
        self.root, self.repo = root, repo
        self.steps: dict[int, dict[str, torch.Tensor]] = {}

    def save(self, step: int, state: dict[str, torch.Tensor]) -> None:
        self.steps[step] = {k: exact_copy(v) for k, v in state.items()}
        save_file(self.steps[step], self.root / f"full-{step}.safetensors")

    def check(self, steps: list[int] | None = None, ref: str = "main") -> None:
        """Every step of the ref restores byte for byte, and nothing is wrong or left behind."""
        repo = Repository.open(self.repo)
        log = repo.log(ref)[::-1]
        assert [m.step for m in log] == (steps if steps is not None else sorted(self.steps))
        for m in log:
            self.check_link(repo, m.link)
        assert verify_repository(repo, threads=1).ok
        assert not list(repo.store.list("leases/"))
        assert not list(repo.store.temporaries())

    def check_link(self, repo: Repository, link: Link) -> None:
        from safetensors.torch import load_file

        out = self.root / "out"
        shutil.rmtree(out, ignore_errors=True)
        apply(repo, out, f"{link.step}-{link.id}", threads=1)
        found = {name: t for path in sorted(out.glob("*.safetensors")) for name, t in load_file(path).items()}
        found, want = raw(found), raw(load_file(self.root / f"full-{link.step}.safetensors"))
        assert found.keys() == want.keys()
        assert not [name for name in found if found[name] != want[name]]
