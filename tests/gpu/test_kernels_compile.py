"""Every kernel compiles for a card: Triton brings its own assembler, so that none is needed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import case, check, words_of  # noqa: E402
from support.running import python_path  # noqa: E402

from deltackpt.codecs import select  # noqa: E402
from deltackpt.codecs.packed import codec  # noqa: E402
from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.gpu import digest, pipeline  # noqa: E402
from deltackpt.gpu.box_digest import sums_of_boxes  # noqa: E402
from deltackpt.gpu.decode import DecodeTask, decode  # noqa: E402
from deltackpt.gpu.places import Place, by_width, other  # noqa: E402
from deltackpt.gpu.plain import PlainWords, look_at  # noqa: E402
from deltackpt.torch_views.boxes import Box  # noqa: E402
from deltackpt.torch_views.words import INTS, from_host  # noqa: E402

pytest.importorskip("triton")
from support.kernel_signatures import (  # noqa: E402
    IN_PLACE,
    noted,
    stores_after_barriers,
    waits_before_stores,
)

TESTS = Path(__file__).parent.parent
NAMES = ["BF16", "F32"]


def decode_a_tensor(name):
    old, new = words_of(np.random.default_rng(0), name, (40, 30), 0.15)
    at = np.flatnonzero(old != new)
    index, tiles = codec.encode(at, old[at], new[at], old, DTYPES[name], (40, 30))
    data = torch.frombuffer(bytearray(b"".join(tiles)), dtype=torch.uint8)
    words = from_host(old.view(f"<i{old.itemsize}") if old.itemsize > 1 else old, "cpu")
    for changes in decode([DecodeTask(index, DTYPES[name], words, 0, len(data), name)], data):
        changes.placed().apply()
    assert np.array_equal(words.numpy().view(new.dtype), new)


def write_in_places(name):
    flat = torch.arange(9, dtype=INTS[DTYPES[name].width])
    where, new = torch.tensor([0, 3]), torch.tensor([7, 8], dtype=flat.dtype)
    places = [Place(flat, 2, where, new, flat[[2, 5]])]
    looked = look_at([PlainWords(flat, where.int(), new)])
    assert looked.sums == [digest.of_change(where, flat[where], new)]
    (made,) = by_width(places)
    assert other(places, made) is None
    made.apply()
    assert flat.tolist() == [0, 1, 7, 3, 4, 8, 6, 7, 8]
    assert other(places, made) == 0
    made.revert()
    assert flat.tolist() == [*range(9)]
    made.apply()
    assert flat.tolist() == [0, 1, 7, 3, 4, 8, 6, 7, 8]


@pytest.mark.heavy
@pytest.mark.skipif(torch.cuda.is_available(), reason="they are compiled there by all other tests")
def test_all_kernels_that_the_interpreter_runs(tmp_path, monkeypatch):
    for module in (digest, pipeline):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    monkeypatch.setattr(select, "SMALL", 0)
    with noted() as lines:
        for name in NAMES:
            decode_a_tensor(name)
            check(*case([(name, (40, 30), 0.1)]))
            write_in_places(name)
            digest.of_run(torch.zeros(99, dtype=INTS[DTYPES[name].width]))
            columns = torch.zeros((9, 11), dtype=INTS[DTYPES[name].width])
            sums_of_boxes([(columns, Box((9, 22), (0, 11), (9, 11)))])
    written = sorted(lines)
    modules = {path.stem for path in (TESTS.parent / "deltackpt/gpu/triton").glob("*.py")}
    helpers = {"__init__", "bits", "lists", "read_bits", "fetch", "host_kernel"}
    assert {line.split('"')[1].rpartition(".")[2] for line in written} >= modules - helpers
    (tmp_path / "kernels").write_text("\n".join(written))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": python_path(TESTS, TESTS.parent), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "support.kernel_signatures", str(tmp_path / "kernels")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for name in IN_PLACE:
        assert f"ok {name}, which waits" in done.stdout


def test_a_store_that_does_not_wait_is_seen():
    """What a kernel of IN_PLACE is held to."""
    load, store, wait = (
        "@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];",
        "@%p2 st.global.b32 [ %rd1 + 0 ], { %r1 };",
        "bar.sync \t0;",
    )
    assert waits_before_stores("\n".join(f"\t{line}" for line in (wait, load, wait, store, store)))
    assert not waits_before_stores("\n".join(f"\t{line}" for line in (wait, load, store)))
    assert not waits_before_stores("\n".join(f"\t{line}" for line in (load, wait, store, load, store)))
    assert not waits_before_stores(f"\t{load}")
    assert not waits_before_stores(f"\t{load}\n\t{wait}\n$L__BB0_1:\n\t{store}")


@pytest.mark.parametrize("name", sorted(IN_PLACE))
def test_kernels_that_write_where_they_read_say_that_they_wait(name):
    """Without the line the compiled code may wait all the same, for the sake of something else that is changed one
    day."""
    modules = (TESTS.parent / "deltackpt/gpu/triton").glob("*.py")
    kernel = re.compile(rf"^@host_kernel\(.*\)\ndef {name}\(", re.MULTILINE)
    (source,) = filter(kernel.search, map(Path.read_text, modules))
    assert stores_after_barriers(source, name)
    lines = source.splitlines()
    barriers = [i for i, line in enumerate(lines) if line.strip().startswith("tl.debug_barrier()")]
    without = ["\n".join(lines[:i] + lines[i + 1 :]) for i in barriers]
    assert not all(stores_after_barriers(text, name) for text in without)
