"""A real vLLM on the CPU. What is set here has to be set before vLLM is imported; its processes inherit it."""

import gc
import os

import pytest

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "deltackpt",
    "VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
}


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """An engine of this process that is collected later takes the groups of the next one with it."""
    yield
    gc.collect()
