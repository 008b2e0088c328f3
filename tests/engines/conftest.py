"""What tests of adapters run against."""

import pytest


@pytest.fixture(params=["vllm", "sglang"])
def engine(request):
    """Either engine's routes, with nothing behind them."""
    fake = pytest.importorskip("support.adapter_engines")
    made = fake.FakeEngine(request.param)
    yield made
    made.close()
