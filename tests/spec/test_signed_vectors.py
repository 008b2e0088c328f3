"""Vectors of signed repositories, by the library and by spec/decode_sign.py: one verdict, and one code."""

from __future__ import annotations

import importlib.util
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.vectors import FIXTURES, INDEX, ROOT, name_of, of_kind

from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import Link
from deltackpt.format.signature import KeySet
from deltackpt.repository import Repository
from deltackpt.signing.memory import Seen, TrustMemory
from deltackpt.signing.policy import TrustPolicy
from deltackpt.store import open_store

pytest.importorskip("cryptography")


@cache
def second() -> ModuleType:
    """spec/decode_sign.py, which is no package."""
    spec = importlib.util.spec_from_file_location("decode_sign_for_vectors", ROOT / "spec/decode_sign.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_library(vector: dict[str, Any], monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    monkeypatch.setenv("DELTACKPT_TRUST_DIR", str(folder))
    monkeypatch.setattr(time, "time", lambda: float(vector["now"]))
    trust = vector["trust"]
    root = KeySet(trust.get("repository"), 0, tuple(trust["keys"]), trust["threshold"])
    repo = Repository.at(open_store(FIXTURES / vector["path"]))
    if (seen := vector.get("seen")) is not None:
        TrustMemory(repo.id).learn(vector["of"], Seen(Link(seen["step"], seen["id"]), seen["time"]))
    repo.secure(TrustPolicy(root, vector.get("max_age")))
    if vector["of"] is None:
        record = vector["record"]
        return repo.find(f"{record['step']}-{record['id']}").to_dict()
    folder_name, _, name = vector["of"].partition("/")
    found = repo.ref(name) if folder_name == "refs" else repo.tag(name)
    assert found is not None
    return found.link.to_dict()


def by_second(vector: dict[str, Any]) -> Any:
    root, trust, now = FIXTURES / vector["path"], vector["trust"], vector["now"]
    if vector["of"] is None:
        return second().read_record(root, vector["record"], trust, now)
    return second().read_name(root, vector["of"], trust, vector.get("seen"), now, vector.get("max_age"))


@pytest.mark.parametrize("vector", of_kind("signed"), ids=name_of)
def test_signed(vector: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for read in (lambda: by_library(vector, monkeypatch, tmp_path), lambda: by_second(vector)):
        try:
            found, code = read(), None
        except DeltackptError as error:
            found, code = None, error.code
        except Exception as error:
            if type(error).__name__ != "Refused":
                raise
            found, code = None, str(getattr(error, "code", ""))
        assert (found, code) == (vector.get("takes"), vector.get("error"))


def test_there_are_vectors_of_both_kinds() -> None:
    assert len([v for v in INDEX if v["kind"] == "signed" and "error" in v]) > 20
    assert len([v for v in INDEX if v["kind"] == "signed" and "error" not in v]) > 10
