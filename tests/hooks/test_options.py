"""The hook's options are checked when it is made: a wrong value is refused by what the option takes."""

import inspect
import subprocess
import sys
from collections import OrderedDict
from dataclasses import fields
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support.training import Net  # noqa: E402

from deltackpt.errors import UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.hooks.optimizer import follow  # noqa: E402
from deltackpt.hooks.options import HookOptions  # noqa: E402
from deltackpt.publish.manifest import AnchorPolicy  # noqa: E402
from deltackpt.util.extras import install_line  # noqa: E402

WRONG = [
    ("ref", 5, "the name of a ref"),
    ("dtype", "bfloat16", "a floating-point torch.dtype"),
    ("dtype", torch.int8, "a floating-point torch.dtype"),
    ("dtype", {"w": "bfloat16"}, "{name: torch.dtype}"),
    ("rename", "w", "{stripped name: name}, a function of a name, or None"),
    ("locate", {"w": (0,)}, "a function, or None"),
    ("snapshot", "gpu", "'device', 'host', or the path of a managed cache"),
    ("snapshot", "s3://bucket/cache", "'device', 'host', or the path of a managed cache"),
    ("snapshot", "s3:/bucket/cache", "'device', 'host', or the path of a managed cache"),
    ("snapshot", Path("gs://bucket/cache"), "'device', 'host', or the path of a managed cache"),
    ("snapshot", "", "'device', 'host', or the path of a managed cache"),
    ("snapshot", None, "'device', 'host', or the path of a managed cache"),
    ("full", "drop", "one of 'wait', 'merge'"),
    ("full", None, "one of 'wait', 'merge'"),
    ("errors", "ignore", "one of 'raise', 'carry'"),
    ("resume", "auto", "one of 'continue', 'rewind', 'anchor'"),
    ("resume", True, "one of 'continue', 'rewind', 'anchor'"),
    ("queue", 0, "a whole number from 1 on"),
    ("queue", -1, "a whole number from 1 on"),
    ("queue", 2.0, "a whole number from 1 on"),
    ("queue", True, "a whole number from 1 on"),
    ("anchor", 5, "an AnchorPolicy"),
    ("anchor", "always", "an AnchorPolicy"),
    ("side", "config.json", "{path: bytes}"),
    ("side", 3, "{path: bytes}"),
    ("shard_bytes", -1, "a whole number from 1 on of bytes, or None"),
    ("shard_bytes", 0, "a whole number from 1 on of bytes, or None"),
    ("shard_bytes", "5GB", "a whole number from 1 on of bytes, or None"),
    ("threads", 0, "a whole number from 1 on, or None for one a processor"),
    ("threads", -2, "a whole number from 1 on, or None for one a processor"),
    ("on_device", "cuda", "one of None, True, False"),
    ("on_device", 1, "one of None, True, False"),
    ("sharded", "yes", "one of None, True, False"),
    ("timeout", -1, "a number of seconds above 0"),
    ("timeout", 0, "a number of seconds above 0"),
    ("timeout", float("nan"), "a number of seconds above 0"),
    ("timeout", float("inf"), "a number of seconds above 0"),
    ("timeout", 1e300, "a number of seconds above 0"),
    ("timeout", "30m", "a number of seconds above 0"),
    ("threads", 10**9, "a whole number up to 1,024"),
    ("timeout", None, "a number of seconds above 0"),
    ("metadata", ["loss"], "a mapping that JSON can hold, or None"),
    ("report", "wandb", "a function, or None"),
]


@pytest.mark.parametrize(("name", "value", "need"), WRONG, ids=[f"{name}={value!r}" for name, value, _ in WRONG])
def test_a_wrong_value(tmp_path, name, value, need):
    with pytest.raises(UsageError) as raised:
        TrainerHook(Net(), tmp_path / "repo", **{name: value})
    error = raised.value
    assert error.code == "hook-option"
    assert error.where == f"the trainer hook, {name}="
    assert error.have == repr(value)
    assert need in error.need
    assert not (tmp_path / "repo").exists()  # before anything is made


def test_a_wrong_encoding(tmp_path):
    with pytest.raises(UsageError, match="'pakced', expected auto, packed, index") as raised:
        TrainerHook(Net(), tmp_path / "repo", encoding="pakced")
    assert raised.value.code == "encoding-choice"


def test_an_anchor_policy_that_no_step_could_meet():
    for wrong in ({"ratio": float("nan")}, {"ratio": -1.0}, {"density": float("nan")}, {"density": -0.1}, {"every": 0}):
        with pytest.raises(UsageError, match="the anchor policy") as raised:
            AnchorPolicy(**wrong)
        assert raised.value.code == "usage"


@pytest.mark.parametrize("typed", ["s3:/bucket/x", "s3//bucket/x", Path("s3://bucket/x")])
def test_a_mistyped_url(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for make in (lambda: TrainerHook(Net(), typed), *callbacks(typed)):
        with pytest.raises(UsageError, match="s3://bucket/x") as raised:
            make()
        assert raised.value.code == "store-scheme"
    assert list(tmp_path.iterdir()) == []


def callbacks(typed):
    try:
        from deltackpt.hooks.transformers import DeltaCheckpointCallback
    except ImportError:
        return []
    return [lambda: DeltaCheckpointCallback(typed)]


@pytest.mark.parametrize("number", [-1, 10**15 + 1, 10**30])
def test_a_number_that_no_step_can_have(number, tmp_path):
    with TrainerHook(Net(), tmp_path / "repo", threads=1) as hook, pytest.raises(UsageError, match="--step: found"):
        hook.step(number)


@pytest.mark.parametrize("repository", [None, 5, ["runs/repo"]])
def test_a_wrong_repository(repository):
    with pytest.raises(UsageError, match="a URL, a directory, or a Repository") as raised:
        TrainerHook(Net(), repository)
    assert raised.value.code == "hook-option"


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("dtype", "bfloat16", "dtype=torch.bfloat16"),
        ("dtype", "torch.float16", "dtype=torch.float16"),
        ("dtype", "bf16", ""),
        ("anchor", 5, "AnchorPolicy(every=5) stores every fifth step whole."),
        ("snapshot", "cache", "A directory beside the script is Path('name') or './name'."),
    ],
)
def test_hints(name, value, hint):
    with pytest.raises(UsageError) as raised:
        HookOptions(**{name: value})
    assert raised.value.hint == hint


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16},
        {"dtype": {"w": torch.float8_e4m3fn, "v": None}},
        {"dtype": lambda name, tensor: None},
        {"rename": {"w": "w"}},
        {"rename": str.lower},
        {"snapshot": Path("cache")},
        {"snapshot": "./cache"},
        {"snapshot": "host"},
        {"queue": 1, "threads": 1, "shard_bytes": 1, "timeout": 0.5},
        {"timeout": 60},
        {"anchor": AnchorPolicy(every=5)},
        {"side": []},
        {"side": OrderedDict(a=b"")},
        {"side": (part for part in ())},
        {"encoding": "full"},
        {"metadata": {"loss": "0.5"}},
        {"report": print},
    ],
)
def test_right_values(options):
    assert HookOptions(**options) == HookOptions(**options)


def test_the_hook_and_its_options_have_the_same_names_and_defaults():
    given = inspect.signature(TrainerHook.__init__).parameters
    options = {f.name: f.default for f in fields(HookOptions)}
    assert {name: p.default for name, p in given.items() if p.kind is p.KEYWORD_ONLY} == options


@pytest.mark.parametrize("every", [0, -1, 1.5, None])
def test_every(tmp_path, every):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with (
        TrainerHook(model, tmp_path / "repo", threads=1) as hook,
        pytest.raises(UsageError, match="every=") as raised,
    ):
        follow(hook, optimizer, every=every)
    assert raised.value.code == "hook-option"


@pytest.mark.filterwarnings("ignore")
def test_the_callback_checks_at_once(tmp_path):
    pytest.importorskip("transformers")
    from deltackpt.hooks.transformers import DeltaCheckpointCallback

    for wrong in ({"every": 0}, {"full": "drop"}, {"threads": 0}):
        with pytest.raises(UsageError) as raised:
            DeltaCheckpointCallback(tmp_path / "repo", **wrong)
        assert raised.value.code == "hook-option"
    with pytest.raises(TypeError, match="fool"):
        DeltaCheckpointCallback(tmp_path / "repo", fool="wait")


WITHOUT = """
import sys
sys.modules[{library!r}] = None  # as if it were not installed
from deltackpt.errors import UsageError
try:
    import {module}
except ImportError as error:
    assert isinstance(error, UsageError)
    print(error.code, error.name, error.exit_code)
    print(error)
"""


@pytest.mark.parametrize(
    ("library", "module", "install"),
    [
        ("torch", "deltackpt.hooks", install_line("torch")),
        ("transformers", "deltackpt.hooks.transformers", install_line("transformers")),
    ],
)
def test_a_library_that_is_not_installed(library, module, install):
    code = WITHOUT.format(library=library, module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"extra-missing {library} 2",
        f"{module}: found no module {library}, expected the library {library} [extra-missing]",
        "",
        f"hint: {install}",
    ]
