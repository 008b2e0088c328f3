"""What every test runs under: small and repeatable by default, larger and random with HYPOTHESIS_PROFILE=ci."""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from deltackpt import kernels

_steady = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # a busy machine is no failure
settings.register_profile("small", max_examples=25, derandomize=True, **_steady)
settings.register_profile("ci", max_examples=400, print_blob=True, **_steady)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "small"))


def pytest_collection_finish():
    """Thousands of tests stay to the end: no garbage collection has to look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", params=["kernels", "numpy"])
def engine(request):
    """The compiled loops, then what stands in for them where there is no compiler: both are held to the same tests."""
    if request.param == "kernels":
        if kernels.LIB is None:
            pytest.skip("the kernels were not compiled")
        yield
        return
    library, kernels.LIB = kernels.LIB, None
    yield
    kernels.LIB = library
