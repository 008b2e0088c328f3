"""What ctypes is told of the compiled functions is what their C sources declare: names, number and types, results.

ctypes believes what it is told: an argument too many or a width that differs is no error, but memory overwritten.
"""

import ctypes
import re

import pytest

from deltackpt import kernels
from deltackpt.kernels import build
from deltackpt.kernels.library import SIGNATURES

PROTOTYPE = re.compile(r"^EXPORT\s+(?P<result>[\w\s*]+?)\s*\b(?P<name>\w+)\((?P<arguments>[^)]*)\)\s*\{", re.M)
TYPES = {
    "void": None,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
}


def ctype(declared: str) -> type | None:
    """The type of ctypes for a C type, of a result or of an argument without its name."""
    if "*" in declared:
        return ctypes.c_void_p
    return TYPES[declared.replace("const", "").strip()]


def prototypes() -> dict[str, tuple[type | None, list[type | None]]]:
    """Of every function that the C sources export: its result and its arguments, as types of ctypes."""
    found = {}
    for path in sorted(build.HERE.glob("*.c")):
        text = re.sub(r"/\*.*?\*/", " ", path.read_text(), flags=re.S)
        assert len(PROTOTYPE.findall(text)) == len(re.findall(r"\bEXPORT\b", text)), f"{path.name}: not understood"
        for match in PROTOTYPE.finditer(text):
            arguments = [] if match["arguments"].strip() == "void" else match["arguments"].split(",")
            types = [ctype(re.sub(r"\w+\s*$", "", argument)) for argument in arguments]
            found[match["name"]] = ctype(match["result"]), types
    return found


DECLARED = prototypes()


def test_every_exported_function_has_a_signature_and_no_other_has() -> None:
    assert DECLARED.keys() == SIGNATURES.keys()


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_a_signature_is_that_of_the_source(name: str) -> None:
    assert SIGNATURES[name] == DECLARED[name]


@pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")
@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_the_loaded_function_has_it(name: str) -> None:
    function = getattr(kernels.LIB, name)
    assert (function.restype, list(function.argtypes)) == SIGNATURES[name]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [("const void *", ctypes.c_void_p), ("int64_t ", ctypes.c_int64), ("const int ", ctypes.c_int), ("void", None)],
)
def test_types_are_read_as_c_means_them(declared: str, expected: type | None) -> None:
    assert ctype(declared) is expected
