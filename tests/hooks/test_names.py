"""Names without wrappers, each once; tied weights once; and errors that list what is wrong."""

import pytest

torch = pytest.importorskip("torch")

from support.training import Net  # noqa: E402

from deltackpt.errors import CheckpointError, UsageError  # noqa: E402
from deltackpt.torch_views.extract import pieces_of  # noqa: E402
from deltackpt.torch_views.names import published_names  # noqa: E402
from deltackpt.torch_views.wrappers import strip  # noqa: E402


@pytest.mark.parametrize(
    "wrapped",
    [
        "module.layers.0.weight",
        "_orig_mod.module.layers.0.weight",
        "module._orig_mod.layers.0.weight",
        "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.weight",
        "layers.0._checkpoint_wrapped_module._orig_mod.weight",
        "layers.0.weight",
    ],
)
def test_wrappers_go_in_any_order_and_place(wrapped):
    assert strip(wrapped) == "layers.0.weight"


def test_parts_of_words_stay():
    assert strip("modules.my_module.x_orig_mod.weight") == "modules.my_module.x_orig_mod.weight"


def test_names_that_collide_are_all_listed():
    with pytest.raises(CheckpointError) as raised:
        published_names(["a.weight", "module.a.weight", "b", "_orig_mod.b", "c"])
    assert raised.value.code == "names-collide"
    for name in ("a.weight", "module.a.weight", "_orig_mod.b"):
        assert repr(name) in raised.value.have
    assert "'c'" not in raised.value.have


def test_names_that_map_nowhere_are_all_listed():
    with pytest.raises(UsageError) as raised:
        published_names(["module.a", "b", "module"], {"a": "x"})
    assert raised.value.code == "names-unmapped"
    assert "'b'" in raised.value.have
    assert "'module'" in raised.value.have
    assert "module.a" not in raised.value.have
    with pytest.raises(UsageError):
        published_names(["a"], lambda name: "deltackpt:" + name)


def test_rename_can_leave_out():
    assert published_names(["a", "b"], lambda name: None if name == "a" else name.upper()) == {"b": "B"}
    with pytest.raises(CheckpointError, match="not-tensors"):
        pieces_of({"w": torch.zeros(2), "_extra_state": {"x": 1}})
    assert [p.name for p in pieces_of({"w": torch.zeros(2), "x": 3}, rename=lambda n: n if n == "w" else None)] == ["w"]


def test_tied_weights_once_and_buffers_that_persist():
    names = [piece.name for piece in pieces_of(Net())]
    assert "embed.weight" in names
    assert "head.weight" not in names
    assert "seen" in names
    assert "scratch" not in names
    assert names == sorted(names)

    class Says(Net):
        _tied_weights_keys = ("embed.weight",)

    names = [piece.name for piece in pieces_of(Says())]
    assert "head.weight" in names
    assert "embed.weight" not in names


def test_views_of_one_storage_that_differ_are_two_tensors():
    both = torch.zeros(4, 4)
    assert len(pieces_of({"a": both, "b": both.t(), "c": both[:2], "empty": both[:0], "empty2": both[:0]})) == 5


def test_casts_are_those_that_were_asked_for():
    state = {"w": torch.ones(3), "ids": torch.ones(3, dtype=torch.int64), "q": torch.ones(3).to(torch.float8_e4m3fn)}
    assert {p.name: p.dtype.name for p in pieces_of(state)} == {"w": "F32", "ids": "I64", "q": "F8_E4M3"}
    cast = {p.name: p.dtype.name for p in pieces_of(state, dtype=torch.bfloat16)}
    assert cast == {"w": "BF16", "ids": "I64", "q": "F8_E4M3"}
    assert {p.name: p.dtype.name for p in pieces_of(state, dtype={"w": torch.float16})}["w"] == "F16"
    some = pieces_of(state, dtype=lambda name, tensor: torch.float64 if name == "w" else None)
    assert {p.name: p.dtype.name for p in some}["w"] == "F64"


def test_what_safetensors_has_not():
    with pytest.raises(CheckpointError, match="dtype-unpublishable"):
        pieces_of({"w": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(UsageError, match="state-unknown"):
        pieces_of(3)


def test_locate_says_where_a_shard_lies():
    [piece] = pieces_of({"w": torch.zeros(2, 3)}, locate=lambda name, tensor: ((4, 0), (8, 3)))
    assert (piece.box.offset, piece.box.shape, piece.box.whole) == ((4, 0), (2, 3), (8, 3))
    with pytest.raises(UsageError, match="placement-unknown"):
        pieces_of({"w": torch.zeros(2, 3)}, locate=lambda name, tensor: ((7, 0), (8, 3)))
