"""The plugin in every release of vLLM: held against the signatures in its wheels, and run over stand-ins of them."""

import importlib
import re
import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from support import vllm_releases  # noqa: E402
from support.engine_steps import Run, nudge  # noqa: E402
from support.fake_vllm import FakeServer, installed  # noqa: E402
from support.fake_vllm_ranks import TABLE, VLLM, first_state, started  # noqa: E402

from deltackpt.engines.serve_updates import ServeOptions, open_serving  # noqa: E402
from deltackpt.engines.vllm import plugin  # noqa: E402
from deltackpt.engines.vllm.release import EXTENSION, FIRST, LAST, check_backend, release_of  # noqa: E402
from deltackpt.errors import UsageError  # noqa: E402

OPTIONAL = {  # asked for where it is
    "vllm.model_executor.model_loader.checkpoint_weight_patch.CheckpointWeightPatch",
    "vllm.model_executor.layers.utils",
    "vllm.distributed.weight_transfer.base.TrainerInitInfo",
    "vllm.distributed.weight_transfer.base.TrainerWeightTransferEngine",
    "vllm.distributed.weight_transfer.factory.WeightTransferTrainerFactory",
}


def test_every_release_that_is_named_is_in_the_table():
    known = {tuple(map(int, version.split(".")[:2])) for version in TABLE}
    assert known == {(0, minor) for minor in range(FIRST[1], LAST[1] + 1)}
    pyproject = (vllm_releases.PLUGIN.parents[2] / "pyproject.toml").read_text()
    assert f'"vllm>={FIRST[0]}.{FIRST[1]},<{LAST[0]}.{LAST[1] + 1}"' in pyproject


@pytest.mark.parametrize("version", TABLE)
def test_what_the_plugin_uses_is_there(version):
    facts = TABLE[version]
    wanted = {f"{module}.{name}" for module, name in vllm_releases.imports()} - OPTIONAL
    assert wanted <= {*facts["offers"]}
    assert facts["layerwise"]["initialize_layerwise_reload"] == "(model)"
    assert facts["layerwise"]["finalize_layerwise_reload"] in ("(model, model_config)", "(*args, **kwargs)")
    assert facts["layerwise"]["get_layerwise_info"] == "(layer)"
    assert facts["layers"] == {
        "restore_layer_on_meta": "(layer, info)", "materialize_meta_tensor": "(meta_tensor)",
        "_get_original_loader": "(tensor)", "_copy_and_restore_kernel_tensors": "(layer, info)",
    }  # fmt: skip
    assert {"loaded_weights", "load_numel"} <= facts["layer_info"]["fields"].keys()
    assert "can_load" in facts["layer_info"]["methods"]
    assert facts["default_loader"]["methods"]["get_all_weights"] == "(self, model_config, model)"
    assert {*facts["factory"]["fields"]} == {"_registry"}
    assert facts["factory"]["methods"]["register_engine"].startswith("(cls, name, module_path_or_cls, class_name=None")
    assert facts["worker"]["sleep"] == "(self, level=1)"
    assert facts["worker"]["wake_up"] == "(self, tags=None)"


@pytest.mark.parametrize("version", TABLE)
def test_the_plugin_can_be_made(version):
    """No abstract method is left open, and every method takes what vLLM passes."""
    facts = TABLE[version]
    with installed(version, facts):
        loader = importlib.import_module(f"{VLLM}.loader").DeltaLoader
        assert not loader.__abstractmethods__
        transfer = importlib.import_module(f"{VLLM}.transfer").DeltaTransfer
        assert not transfer.__abstractmethods__
        if release_of(version, "a test").has_backends:
            assert facts["backend"] == "any"
            for name in ("receive_weights", "start_weight_update", "finish_weight_update", "shutdown"):
                given = facts["engine"]["methods"][name].strip("()").split(", ")
                assert getattr(transfer, name).__code__.co_argcount == len(given), name
        else:
            with pytest.raises(UsageError) as caught:
                transfer(None, None)
            assert caught.value.code == "engine-version"
            assert EXTENSION in caught.value.hint
        worker = importlib.import_module(f"{VLLM}.worker").DeltaWorker
        own = [name for name in dir(worker) if not name.startswith("__")]
        assert all(re.match("_?deltackpt_", name) for name in own)  # vLLM refuses one that its worker has
        importlib.import_module(f"{VLLM}.plugin").register()


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "own base"])
@pytest.mark.parametrize("version", TABLE)
def test_a_server_of_every_release_is_followed(tmp_path, version, cached):
    run, events = Run(tmp_path), []
    run.publish(first_state())
    with installed(version, TABLE[version]):
        rank, model = started(run, version)
        server = FakeServer(version, TABLE[version], rank)
        try:
            cache = tmp_path / "cache" if cached else None
            options = ServeOptions(timeout=60, threads=1, check=True)
            made = open_serving(run.url, cache, [f"vllm={server.url}"], lambda e, f: events.append((e, f)), options)
            for step in range(4):
                if step:
                    run.publish(nudge(run.states[step - 1], step, 0.2))
                made.update_cache()
                assert made.update_engines(), events
                assert model.is_step(run.states[step])
                assert made.engines[0].client.version() == str(step)
            before = len(server.calls)
            assert made.update_engines()
            again = server.calls[before:]
        finally:
            server.close()
    assert not [c for c in again if c.startswith(("/pause", "/update_weights", "/start"))]
    assert not server.paused
    taken = [fields for event, fields in events if event == "taken"]
    way = "journal" if cached else "patches"
    assert [(t["step"], t["path"]) for t in taken] == [(0, "none"), *((step, way) for step in (1, 2, 3))]
    assert {event for event, _ in events} <= {"taken", "switch"}


def test_other_releases_are_refused_in_words():
    for version in ("0.19.1", "0.34.0", "1.0", "0.1.dev3+gabc", "", "nonsense", "0.200", "2" * 999):
        with pytest.raises(UsageError) as caught:
            release_of(version, "it")
        assert (caught.value.code, len(str(caught.value)) < 400) == ("engine-version", True)
    for version in ("0.20.2", "0.33.0+cu130", "v0.26.1", "0.33.1.dev7"):
        release_of(version, "it")
    with pytest.raises(UsageError, match="or newer"):
        check_backend("0.24.0", "it")


def test_a_server_of_another_release_is_refused(tmp_path):
    run, events = Run(tmp_path), []
    run.publish(first_state())
    server = FakeServer("0.19.0", TABLE["0.20.0"], None)
    try:
        made = open_serving(run.url, None, [f"vllm={server.url}"], lambda e, f: events.append((e, f)))
        made.update_cache()
        assert not made.update_engines()
    finally:
        server.close()
    ((event, fields),) = events
    assert (event, fields["error"]) == ("failed", "engine-version")


def test_small_weights_stay_unpacked_for_amx(monkeypatch):
    """INT8 alone is packed: it is computed by nothing else. Asked for twice, it is wrapped once."""
    layers, utils = ModuleType("vllm.model_executor.layers"), ModuleType("vllm.model_executor.layers.utils")
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: n >= 16
    layers.utils = utils
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    plugin._leave_unpacked()
    wrapped = utils.check_cpu_sgl_kernel
    plugin._leave_unpacked()
    assert utils.check_cpu_sgl_kernel is wrapped
    assert [wrapped(32, 64, dtype) for dtype in (torch.bfloat16, torch.float16, torch.int8)] == [False, False, True]
    assert not wrapped(8, 64, torch.int8)
