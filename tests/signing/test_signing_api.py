"""What the package offers as functions, and the environment, which speaks for all that is opened by URL."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chains import small_state
from support.signed import keys_of, write_key
from support.states import make_checkpoint

import deltackpt
from deltackpt.errors import ChainError, UsageError
from deltackpt.repository import Repository
from deltackpt.signing.keys import PrivateKey
from deltackpt.signing.openssh import public_line
from deltackpt.signing.policy import TrustPolicy

KEY, OTHER = PrivateKey.generate(), PrivateKey.generate()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    path = make_checkpoint(tmp_path / "step_0", small_state())
    deltackpt.write(path, tmp_path / "repo", sign=write_key(tmp_path / "key", KEY))
    return tmp_path / "repo"


def test_functions_take_whom_to_trust(repo: Path, tmp_path: Path) -> None:
    good, bad = TrustPolicy(keys_of(KEY)), TrustPolicy(keys_of(OTHER))
    assert deltackpt.apply(repo, tmp_path / "a", trust=good).step == 0
    assert deltackpt.apply_to_cache(repo, tmp_path / "cache", trust=good).step == 0
    assert deltackpt.verify(repo, trust=good).ok
    assert not deltackpt.verify(repo, trust=bad).ok
    assert deltackpt.mirror(repo, tmp_path / "copy", trust=good).steps == 1
    for call in (
        lambda: deltackpt.apply(repo, tmp_path / "b", trust=bad),
        lambda: deltackpt.apply_to_cache(repo, tmp_path / "cache", trust=bad),
        lambda: deltackpt.mirror(repo, tmp_path / "copy", trust=bad),
        lambda: deltackpt.write(tmp_path / "step_0", repo, trust=bad),
    ):
        with pytest.raises(ChainError, match="signature-missing"):
            call()


def test_the_environment_speaks_for_all(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACKPT_TRUST", public_line(OTHER.public))
    with pytest.raises(ChainError, match="signature-missing"):
        Repository.open(repo).find("latest")
    assert Repository.open(repo).secure(TrustPolicy(keys_of(KEY))).find("latest").step == 0
    monkeypatch.setenv("DELTACKPT_TRUST", public_line(KEY.public))
    assert Repository.open(repo).find("latest").step == 0
    monkeypatch.setenv("DELTACKPT_SIGN_KEY", str(tmp_path / "no"))
    with pytest.raises(UsageError, match="sign-key"):
        Repository.open(repo)
