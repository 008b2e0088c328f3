"""What `import deltackpt` offers: documented, lazy, typed, and working as the docstrings show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.states import make_checkpoint, tree

import deltackpt

ROOT = Path(__file__).parents[1]
FUNCTIONS = ["apply", "apply_to_cache", "compact", "diff", "follow", "gc", "mirror", "verify", "write"]
CLASSES = ["Cache", "Repository"]

USER = """
import deltackpt
from deltackpt.collector.retention import Policy


def publish(step: int) -> float | None:
    done = deltackpt.write(f"step_{step}", "repo", step=step, encoding="auto")
    return done.bits_per_change


def restore(repo: deltackpt.Repository) -> str:
    try:
        return deltackpt.apply(repo, "out", "latest").path
    except deltackpt.errors.DeltackptError as error:
        return error.code


def keep() -> bool:
    deltackpt.compact("repo", levels=(8, 64))
    plan, result = deltackpt.gc("repo", Policy(last=20))
    deltackpt.mirror("repo", "copy")
    deltackpt.follow("repo", "cache", lambda switch: print(switch.path, switch.step))
    return deltackpt.verify("repo").ok and plan.frees >= 0 and result is not None


def hook(model: object) -> None:
    with deltackpt.TrainerHook({}, "repo") as trainer:
        trainer.step(1)
"""


LARGE = ("torch", "transformers", "compressed_tensors", "huggingface_hub", "matplotlib", "triton")
SKIPPED = "follow_imports = skip\nignore_missing_imports = True\n"


def test_every_name_is_there():
    pytest.importorskip("torch")
    assert {*FUNCTIONS, *CLASSES, "TrainerHook", "errors", "__version__"} == set(deltackpt.__all__)
    assert set(dir(deltackpt)) == set(deltackpt.__all__)
    for name in deltackpt.__all__:
        assert getattr(deltackpt, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        deltackpt.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_shows_an_example_and_its_errors(name):
    text = getattr(deltackpt, name).__doc__
    assert f"deltackpt.{name}(" in text or f"{name}(" in text
    assert "Raises" in text


def test_the_import_is_light():
    script = "import sys, deltackpt; print([m for m in ('numpy', 'torch', 'fsspec', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_help_and_import_of_all_names_work_without_torch():
    script = """
import sys
sys.modules["torch"] = None
from deltackpt import *
import deltackpt, pydoc
assert write is deltackpt.write and "apply_to_cache" in pydoc.render_doc(deltackpt)
try:
    deltackpt.TrainerHook
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert f"{sys.executable} -m pip install 'torch>=2.2'" in done.stdout


def test_a_session(tmp_path):
    values = [bytes([i, 60]) * 64 for i in range(3)]
    steps = [make_checkpoint(tmp_path / f"step_{i}", {"w": ("BF16", (64,), data)}) for i, data in enumerate(values)]
    repo, cache = tmp_path / "repo", tmp_path / "cache"
    for path in steps:
        deltackpt.write(path, repo)
    assert deltackpt.diff(steps[0], steps[1]).total.changed == 64
    deltackpt.apply(repo, tmp_path / "out", 1)
    assert tree(tmp_path / "out") == tree(steps[1])
    done = deltackpt.apply_to_cache(deltackpt.Repository.open(repo), cache)
    assert tree(Path(done.path)) == tree(steps[2])
    head = deltackpt.Repository.open(repo).head()
    assert head is not None
    assert deltackpt.Cache(str(cache)).current() == deltackpt.Cache(cache).current() == head.link
    assert deltackpt.verify(repo).ok
    assert deltackpt.verify(cache / "current", against=repo).ok
    part = next((repo / "patches").rglob("part-*.safetensors"), None)
    assert part is None or deltackpt.verify(part).ok
    deltackpt.compact(repo, 0)
    plan, result = deltackpt.gc(repo, dry_run=True)
    assert plan.steps == 0
    assert result is None
    assert deltackpt.mirror(repo, tmp_path / "copy").steps == 3
    with pytest.raises(deltackpt.errors.UsageError):
        deltackpt.verify(deltackpt.Repository.open(repo), against=repo)


def test_a_users_script_is_typed(tmp_path):
    pytest.importorskip("mypy")
    script = tmp_path / "user.py"
    script.write_text(USER)
    # The library is checked by `make check`, and torch is no part of it: looking through both takes four times as long.
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n[mypy-{','.join(f'{name}.*' for name in LARGE)}]\n{SKIPPED}")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", "mypy", str(script)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout
    assert (ROOT / "deltackpt" / "py.typed").is_file()
