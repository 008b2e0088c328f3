"""Kernels are compiled beside what a process does first; what goes wrong there is told, and left to the first step."""

import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import piece_of, words_of  # noqa: E402

from deltackpt.gpu import compile_ahead, compile_rounds, digest, pipeline  # noqa: E402

pytest.importorskip("triton")


def pieces():
    old, _ = words_of(np.random.default_rng(0), "BF16", (8, 8), 0.1)
    return [piece_of("w", old, (8, 8))]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    for module in (compile_ahead, digest, pipeline):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    monkeypatch.setattr(compile_rounds, "SHAPE", (32, 64))
    monkeypatch.setattr(compile_ahead, "_RECEIVING", {})


@pytest.mark.heavy
def test_what_a_step_needs_is_run_before_it(caplog, monkeypatch):
    changed = []
    capture = pipeline.capture
    monkeypatch.setattr(pipeline, "capture", lambda *a: (capture(*a), changed.extend(a[2])))
    with caplog.at_level(logging.INFO, "deltackpt.gpu.compile_ahead"):
        (ahead,) = compile_ahead.compile_ahead(pieces())
        assert ahead.wait(300)
    assert ahead.error == ""
    assert ahead.seconds is not None
    assert "kernels for BF16 are compiled" in caplog.text
    assert [delta.name for delta in changed] == ["w0", "w1", "w2", "w0"]
    assert all(len(delta.new) == -(-32 * 64 // 61) for delta in changed)


def test_an_error_is_told_and_nothing_else_is_lost(caplog, monkeypatch):
    def breaks(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(pipeline, "capture", breaks)
    (ahead,) = compile_ahead.compile_ahead(pieces())
    assert ahead.wait(300)
    assert ahead.error == "RuntimeError: no compiler"
    assert "a step will do it" in caplog.text


def test_a_device_without_kernels_is_left_alone(monkeypatch):
    monkeypatch.setattr(compile_ahead, "has_kernels", lambda device: False)
    assert compile_ahead.compile_ahead(pieces()) == []
