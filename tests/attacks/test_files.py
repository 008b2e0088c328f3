"""Attacks that are files: each is refused with its code, in bounded memory and few calls."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.vectors import (
    INDEX,
    ROOT,
    base_of,
    code_of,
    data_of,
    folder_of,
    name_of,
    read_checkpoint,
    read_record,
    streamed,
)

BY_NAME = {Path(v["path"]).stem: v for v in INDEX}
ATTACKS = {
    1: "header_length_of_two_to_the_63 header_length_above_the_limit header_ends_after_the_file",
    2: "shape_product_overflows shape_overflows_beside_a_zero entry_shape_overflows entry_shape_overflows_in_its_whole",
    3: "tensors_overlap tensors_leave_a_gap offsets_reversed offsets_past_two_to_the_62 "
    "file_ends_inside_the_last_tensor",
    4: "header_with_a_tensor_twice metadata_with_a_key_twice json_with_a_key_twice index_with_a_key_twice",
    5: "header_a_hundred_thousand_levels_deep json_of_a_hundred_thousand_brackets index_a_hundred_thousand_levels_deep",
    6: "tensor_name_empty tensor_name_of_10000_characters metadata_is_a_list "
    "table_name_is_empty table_name_of_10000_bytes table_name_is_that_of_the_metadata",
    7: "name_that_looks_like_a_path",
    8: "manifest_with_a_name_that_goes_up manifest_with_a_name_that_is_absolute manifest_with_a_name_that_has_a_drive "
    "manifest_with_a_name_that_has_a_nul layout_with_a_side_path_that_goes_up index_with_a_shard_that_goes_up "
    "layout_with_a_shard_path_that_goes_up index_with_a_shard_that_has_a_backslash edge_with_a_name_that_goes_up",
    12: "index_positions_unsorted index_positions_repeated index_positions_past_the_end values_fewer_than_indices",
    13: "packed_gap_runs_past_the_tile packed_quotient_longer_than_the_tile packed_quotient_that_overflows_32_bits",
    14: "packed_counts_that_no_bytes_pay_for packed_with_more_tiles_than_the_table_holds packed_count_above_the_span "
    "full_box_of_a_new_tensor_of_an_exabyte "
    "planes_of_more_chunks_than_the_table_holds table_of_too_many_entries packed_tile_of_two_to_the_32_elements",
    15: "frame_states_too_small_a_size frame_states_too_large_a_size frame_states_no_size frame_states_a_terabyte "
    "frame_expands_past_the_size_it_states frame_is_cut_off frame_is_followed_by_a_byte frame_is_followed_by_another "
    "frame_needs_a_large_window frame_needs_a_dictionary frame_after_a_skippable_one",
    16: "checkpoint_of_pickles checkpoint_with_a_pickle_for_a_shard",
    18: "tensor_in_4097_boxes",
}
FILES = [(number, name) for number, names in ATTACKS.items() for name in names.split()]


def read(vector):
    if vector["kind"] == "part":
        streamed(data_of(vector), base_of(vector))
    elif vector["kind"] == "checkpoint":
        with tempfile.TemporaryDirectory() as folder:
            read_checkpoint(folder_of(vector, Path(folder) / "checkpoint"))
    elif vector["kind"] != "chain":
        read_record(vector, data_of(vector))


@pytest.mark.parametrize(("number", "name"), FILES)
def test_outcome(number, name):
    """As attacks/README.md says."""
    vector = BY_NAME[name]
    rows = re.findall(r"^\| (\d+) \| .+ \| (.+) \|$", (Path(__file__).parent / "README.md").read_text(), re.MULTILINE)
    outcome = dict(rows)[str(number)]
    code = code_of(lambda: read(vector))
    assert code == vector.get("error")
    assert f"`{code}`" in outcome if code else outcome.startswith("accepted")


FOLDERS = ("chain", "gc", "mirror", "signed", "write")


@pytest.mark.parametrize("vector", [v for v in INDEX if "error" in v and v["kind"] not in FOLDERS], ids=name_of)
def test_refused_in_few_calls(vector):
    """Counted, since clocks lie on a busy machine: no input keeps a reader busy for longer than its bytes pay for."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        code = code_of(lambda: read(vector))
    finally:
        sys.setprofile(None)
    assert code == vector["error"]
    long = vector["kind"] == "part" or "" in vector.get("repeat", {})
    assert calls < 5_000 + (8 * len(data_of(vector)) if long else 0)


MEMORY = """
import resource, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests", {root!r} + "/tests/attacks"]
from test_files import FOLDERS, INDEX, code_of, read
for vector in INDEX:  # once for whatever is made on the first use
    if "error" not in vector and vector["kind"] == "part" and "two_chunks" in vector["path"]:
        read(vector)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for vector in INDEX:
    if "error" in vector and vector["kind"] not in FOLDERS and "repeat" not in vector:
        code_of(lambda: read(vector))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_refused_in_bounded_memory():
    """All invalid vectors that are not long in one process, whose peak grows by less than 32 MB."""
    program = MEMORY.format(root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 << 10  # in KiB
