"""An engine is its folder and one line of a registry: no neutral module knows it, and the registry needs no torch."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from deltackpt_cli.app import run
from support import toy_engine
from support.chains import World

import deltackpt
from deltackpt.engines import clients

ROOT = Path(deltackpt.__file__).parent
KINDS = ("vllm", "sglang")
TORCH_FREE = [
    "deltackpt.engines",
    "deltackpt.engines.serve",
    "deltackpt.engines.fleet",
    "deltackpt.engines.update_round",
    "deltackpt.engines.shared_cache",
    "deltackpt.engines.cached_steps",
    "deltackpt.engines.identify",
    "deltackpt.engines.clients",
    *(name.partition(":")[0] for name in clients.ENGINES.values()),
]


def is_neutral(path):
    """`interop` has vLLM's and SGLang's formats, which are other things by the same names, and `quantize` writes the
    configs of checkpoints. What an engine has of a live session stands in `live`, above `engines`."""
    name = path.relative_to(ROOT).as_posix()
    own = [place for kind in KINDS for place in (f"engines/{kind}/", f"live/{kind}.py")]
    return not name.startswith(("interop/", "quantize/", *own)) and name != REGISTRY


REGISTRY = "engines/clients/__init__.py"


def code_of(path):
    """Without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body[0] = ast.Pass()
    return ast.unparse(tree).lower()


def test_neutral_modules_know_no_engine():
    paths = [path for path in ROOT.rglob("*.py") if is_neutral(path)]
    assert ROOT / "engines/proof.py" in paths
    for path in paths:
        code = code_of(path)
        assert not [kind for kind in (*KINDS, "kv_cache", "quant_method", "unquantized") if kind in code], path


def test_the_registry_has_one_line_for_each_kind():
    lines = [line for line in (ROOT / REGISTRY).read_text().splitlines() if any(kind in line.lower() for kind in KINDS)]
    assert len(lines) == len(clients.ENGINES) == len(KINDS)
    for kind in clients.ENGINES:
        assert clients.client_of(f"{kind}=http://h:1", clients.ClientOptions("r", Path())).kind == kind


def test_what_follows_for_engines_needs_no_torch():
    """Nor any engine: the follower of a host may run beside containers that have them."""
    gone = "import sys; sys.modules |= dict.fromkeys(('torch', 'vllm', 'sglang', 'transformers')); "
    code = gone + "import " + ", ".join(TORCH_FREE)
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def toys(monkeypatch):
    """Two engines of a kind that is registered by a line."""
    monkeypatch.setitem(clients.ENGINES, "toy", toy_engine.REGISTERED)
    made = {f"http://toy-{i}": toy_engine.ToyEngine() for i in range(2)}
    monkeypatch.setattr(toy_engine, "RUNNING", made)
    return made


def test_a_new_kind_of_engine_is_served(tmp_path, toys, capsys):
    world = World(tmp_path)
    world.run(2)
    engines = [word for url in toys for word in ("--engine", f"toy={url}")]
    line = ["serve-updates", str(world.url), str(tmp_path / "cache"), "--once", "--json", "--together", *engines]
    assert run(line) == 0
    events = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
    assert [(e["event"], e.get("engine")) for e in events] == [
        ("switch", None), *(("taken", f"toy={url}") for url in toys),
    ]  # fmt: skip
    assert [e["mode"] for e in events[1:]] == ["toy", "toy"]
    for toy in toys.values():
        assert (toy.version, toy.path.name[:9]) == ("1", "00000001-")
        assert toy.calls == ["stage", "pause", "apply", "drop_cache", "finish", "resume"]
    second = list(toys.values())[1]
    second.refuses = True
    world.run(1)
    assert run(line) == 4
    assert [toy.version for toy in toys.values()] == ["1", "1"]
    assert "undo" in next(iter(toys.values())).calls
