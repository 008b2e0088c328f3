"""Nothing that a test signs or sees is remembered in the user's own folder."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cryptography")


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DELTACKPT_TRUST", "DELTACKPT_MAX_AGE", "DELTACKPT_SIGN_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DELTACKPT_TRUST_DIR", str(tmp_path / "memory"))
    return tmp_path / "memory"
