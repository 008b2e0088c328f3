"""What a method notes of a layer's tensors is the layer's memory again, once the engine's reload has run."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from deltackpt.engines.vllm import retied  # noqa: E402


class Held:
    """Objects of the engine's: only such are looked through."""

    __module__ = "vllm.made_up"

    def __init__(self, **held):
        vars(self).update(held)


class Layer(torch.nn.Module):
    """Of experts: their kernel computes with the scales that it was made with."""

    def __init__(self, how=lambda scale: scale):
        super().__init__()
        self.how, self.quant_method = how, Held()
        self.fill(1.0)

    def fill(self, value):
        for name, size in (("weight", 6), ("scale", 4)):
            self.register_parameter(name, torch.nn.Parameter(torch.full((size,), value), requires_grad=False))
        config = Held(first=Held(scale=self.how(self.scale)), second=Held(scale=None))
        experts = Held(config=config)
        self.quant_method.kernel = Held(impl=Held(inner=Held(experts=experts)), others=[experts])

    @property
    def kept(self):
        return self.quant_method.kernel.impl.inner.experts.config.first.scale


def reload(layerwise, layer, value, spread=False):
    """As vLLM's: new tensors, processed, copied into those that the layer had."""
    old = dict(layer._parameters)
    layer.fill(value)
    if spread:  # the one that the kernel has is laid out in another way
        made = torch.full((8,), value)[::2]
        layer.register_parameter("scale", torch.nn.Parameter(made, requires_grad=False))
        layer.quant_method.kernel.impl.inner.experts.config.first.scale = made
    layerwise._copy_and_restore_kernel_tensors(layer, SimpleNamespace(kernel_tensors=(old, {})))


def module():
    def copy(layer, info):
        for name, old in info.kernel_tensors[0].items():
            old.data.copy_(getattr(layer, name))
        layer._parameters.update(info.kernel_tensors[0])

    return SimpleNamespace(_copy_and_restore_kernel_tensors=copy)


VIEWS = {
    "the parameter": lambda scale: scale,
    "its data": lambda scale: scale.data,
    "a part": lambda scale: scale.data[1:3],
    "bytes": lambda scale: scale.data.view(torch.uint8),
    "turned": lambda scale: scale.data.view(2, 2).t(),
}


@pytest.mark.parametrize("how", VIEWS.values(), ids=VIEWS)
def test_a_kernel_sees_what_is_written_after_a_reload(how):
    layerwise, layer = module(), Layer(how)
    address = layer.scale.data_ptr()
    reload(layerwise, layer, 2.0)
    layer.scale.fill_(3.0)
    assert retied.strays(layer, retied.tensors_of(layer))
    assert not torch.equal(layer.kept, how(layer.scale))  # nobody looked after it
    for _ in range(2):
        retied.watch_reloads(layerwise)
    for value in (4.0, 5.0):
        reload(layerwise, layer, value)
        assert torch.equal(layer.kept, how(layer.scale))
        layer.scale.copy_(torch.arange(4.0) + value)
        assert torch.equal(layer.kept, how(layer.scale))
    assert layer.scale.data_ptr() == address
    assert not retied.strays(layer, retied.tensors_of(layer))
    assert retied.loose(torch.nn.Sequential(layer)) is None


def test_what_is_laid_out_in_another_way_is_told_until_it_is_well():
    layerwise, layer = module(), Layer()
    retied.watch_reloads(layerwise)
    reload(layerwise, layer, 2.0, spread=True)
    model = torch.nn.Sequential(torch.nn.Identity(), layer)
    assert retied.loose(model) == "1"
    assert retied.loose(torch.nn.Sequential(torch.nn.Identity())) is None  # another model's
    reload(layerwise, layer, 3.0)
    assert retied.loose(model) is None


def test_a_copy_of_its_own_stays_a_copy():
    """A method may make what it computes with: such a layer is never mapped."""
    layerwise, layer = module(), Layer(lambda scale: scale.data.clone())
    retied.watch_reloads(layerwise)
    reload(layerwise, layer, 2.0)
    layer.scale.fill_(7.0)
    assert torch.equal(layer.kept, torch.full((4,), 2.0))
    assert retied.strays(layer, retied.tensors_of(layer))
