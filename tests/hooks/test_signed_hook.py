"""A trainer that signs, and one that asks for signatures before it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cryptography")

from support.signed import keys_of, write_key  # noqa: E402
from support.training import Net, train_step  # noqa: E402

from deltackpt.errors import ChainError, UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.signing.keys import PrivateKey  # noqa: E402
from deltackpt.signing.policy import TrustPolicy  # noqa: E402

KEY, OTHER = PrivateKey.generate(), PrivateKey.generate()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DELTACKPT_TRUST_DIR", str(tmp_path / "memory"))
    return tmp_path / "repo"


def run(model: Any, place: Path, steps: int, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with TrainerHook(model, place, dtype=torch.bfloat16, threads=1, **options) as hook:
        begin = 0 if hook.last_step is None else hook.last_step + 1
        for step in range(begin, begin + steps):
            train_step(model, optimizer, step)
            hook.step(step)


def test_every_step_is_signed_and_training_goes_on(place: Path, tmp_path: Path) -> None:
    model, trust = Net(), TrustPolicy(keys_of(KEY))
    run(model, place, 3, sign=write_key(tmp_path / "key", KEY))
    repo = Repository.open(place).secure(trust)
    assert repo.find("latest").step == 2
    assert [repo.find(step).step for step in range(3)] == [0, 1, 2]
    run(model, place, 2, sign=str(tmp_path / "key"), trust=trust)
    assert Repository.open(place).secure(trust).find("latest").step == 4
    with pytest.raises(ChainError, match="signature-missing"):
        run(model, place, 1, sign=KEY, trust=TrustPolicy(keys_of(OTHER)))
    assert Repository.open(place).find("latest").step == 4


def test_the_environment_signs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACKPT_SIGN_KEY", KEY.private_text().decode())
    run(Net(), place, 2)
    monkeypatch.delenv("DELTACKPT_SIGN_KEY")
    assert Repository.open(place).secure(TrustPolicy(keys_of(KEY))).find("latest").step == 1


def test_what_is_no_key_is_not_shown(place: Path) -> None:
    with pytest.raises(UsageError, match="hook-option") as caught:
        TrainerHook(Net(), place, sign=KEY.private_text())  # type: ignore[arg-type]
    assert "PRIVATE" not in str(caught.value)
    with pytest.raises(UsageError, match="hook-option"):
        TrainerHook(Net(), place, trust=7)  # type: ignore[arg-type]
    assert not place.exists()
