"""spec/ and the code say the same: rules and vectors, constants, codes, dtypes, the examples, and the links."""

import ast
import hashlib
import importlib
import json
import re
import zlib
from functools import partial

import numpy as np
import pytest
from support.spec_text import (
    CLASSES,
    DECODER,
    FORMAT,
    NAMES,
    OF_THE_COMMAND,
    OF_THE_FORMAT,
    REGISTRY,
    ROWS,
    RULE,
    SIGNATURES,
    STORE,
    TEXTS,
    VERSION1,
)
from support.store_rules import SHOWN_BY
from support.vectors import INDEX, ROOT, code_of, second

from deltackpt.codecs import CODECS
from deltackpt.format.dtypes import DTYPES

# Rules that no bytes can show: what a writer must do, or what holds for all vectors. Each with the test that shows it.
ELSEWHERE = {
    "F-READ-1": "spec/test_vectors.py::test_parts",
    "F-READ-4": "spec/test_vectors.py::test_parts",
    "F-APPLY-6": "cache/test_cache_readers.py::test_the_directory_that_readers_hold_is_left_alone",
    "F-DOBJ-3": "spec/test_spec.py::test_limits_of_objects",
    "F-TAB-15": "patch/test_remote_part.py::test_a_table_above_the_limit_is_not_asked_for",
    "F-VER-1": "spec/test_spec.py::test_codes_are_given_once",
    "F-WRITE-4": "publish/test_write.py::test_a_checkpoint_that_changes_while_it_is_read",
    "F-WRITE-5": "codecs/test_encodings.py::test_any_change_comes_back",
    "F-WRITE-8": "codecs/test_encodings.py::test_a_plane_is_compressed_where_that_saves_three_percent",
    "F-WRITE-7": "publish/test_write.py::test_a_base_that_was_edited_by_one_bit",
}


def test_every_rule_has_a_vector_and_every_vector_a_rule():
    rules = dict(RULE.findall(FORMAT + VERSION1))
    shown = {rule for vector in INDEX for rule in vector["rules"]}
    assert shown <= rules.keys() | dict(RULE.findall(STORE + SIGNATURES)).keys()
    assert not shown & ELSEWHERE.keys(), "a vector shows it: take it off the list"
    assert rules.keys() == (shown & rules.keys()) | ELSEWHERE.keys()
    assert all(vector["rules"] for vector in INDEX)


def test_every_rule_of_the_store_has_a_test():
    rules = {rule for rule, text in RULE.findall(STORE + SIGNATURES) if re.search(r"\bMUST\b", text)}
    assert rules == SHOWN_BY.keys()


@pytest.mark.parametrize("rule", [*ELSEWHERE, *SHOWN_BY])
def test_what_no_vector_shows_has_a_test(rule):
    where = (ELSEWHERE | SHOWN_BY)[rule]
    path, _, name = where.partition("::")
    assert re.search(rf"def {name}\(", (ROOT / "tests" / path).read_text()), where


def test_every_must_has_a_number():
    for text in TEXTS:
        for line in text.splitlines():
            if re.search(r"\bMUST\b", line) and not line.startswith("The words MUST"):
                assert RULE.match(line), line
    found = [rule for text in TEXTS for rule, _ in RULE.findall(text)]
    assert len(set(found)) == len(found), "a rule twice"


def test_rules_that_are_named_exist():
    rules = {rule for text in TEXTS for rule, _ in RULE.findall(text)}
    for text in [*TEXTS, *(path.read_text() for path in DECODER)]:
        assert set(re.findall(r"\[([FS]-[A-Z]+-\d+)\]", text)) <= rules


# Where the library holds a constant of FORMAT, whose names are those of the text, not of modules.
HELD_BY = {
    "PART_VERSION": "patch.index.VERSION",
    "TABLE": "patch.index.TABLE",
    "PAYLOAD": "patch.index.PAYLOAD",
    "RESERVED": "format.tensor_names.RESERVED",
    "SIZE_LIMIT": "format.dtypes.SIZE_LIMIT",
    "MAX_BYTES": "format.varint.MAX_BYTES",
    "JSON_DEPTH": "format.canonical.MAX_DEPTH",
    "JSON_MARKS": "format.canonical.MAX_MARKS",
    "INT_LIMIT": "format.canonical.INT_LIMIT",
    "MAX_HEADER": "format.safetensors_header.MAX_HEADER",
    "MAX_NAME": "format.tensor_names.MAX_NAME",
    "MAX_RANK": "format.safetensors_header.MAX_RANK",
    "MAX_OBJECT_NAME": "format.names.MAX_OBJECT_NAME",
    "MAX_PATH": "format.names.MAX_PATH",
    "MAX_TABLE": "patch.index.MAX_TABLE",
    "MAX_ENTRIES": "codecs.table.MAX_ENTRIES",
    "MAX_BOXES": "codecs.boxes.MAX_BOXES",
    "BOXED": "codecs.table.BOXED",
    "REPEAT": "codecs.table.REPEAT",
    "CUT": "codecs.packed.list_index.CUT",
    "CHUNK": "codecs.planes.CHUNK",
    "MAX_WINDOW": "codecs.planes.MAX_WINDOW",
    "MAX_TILE": "codecs.packed.grid.MAX_TILE",
    "MAX_LENGTH": "codecs.packed.list_index.MAX_LENGTH",
    "MAX_COUNT_BITS": "codecs.packed.list_index.MAX_COUNT_BITS",
    "MAX_CLASSES": "codecs.packed.classes.MAX_CLASSES",
    "MAX_K": "codecs.packed.gaps.MAX_K",
    "BLOCK": "format.state_digest.BLOCK",
    "DOMAIN": "format.state_digest.DOMAIN",
    "MAX_MANIFEST": "format.manifest.MAX_MANIFEST",
    "MAX_STEP": "format.manifest.MAX_STEP",
    "MAX_PACK": "format.pack.MAX_PACK",
    "MAX_LAYOUT": "format.layout.MAX_LAYOUT",
    "MAX_FILES": "format.layout.MAX_FILES",
    "MAX_TENSORS": "format.layout.MAX_TENSORS",
    "MAX_DIGESTS": "format.digests.MAX_DIGESTS",
    "MAX_SMALL": "repository.marker.MAX_SMALL",
}
CONSTANTS = re.findall(r"`([A-Z_]+) = ([^`]+)`", FORMAT)


def test_constants_are_given_once():
    assert [name for name, _ in CONSTANTS] == list(HELD_BY)


@pytest.mark.parametrize(("name", "value"), CONSTANTS)
def test_constants(name, value):
    value = ast.literal_eval(value)
    assert getattr(second(), name, value) == value
    module, _, attribute = HELD_BY[name].rpartition(".")
    assert getattr(importlib.import_module(f"deltackpt.{module}"), attribute) == value, HELD_BY[name]


def test_dtypes():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (\d+) \| (\d+) \| (\S+(?: \d+)?) \| (\S+) \|$", REGISTRY, re.MULTILINE)
    assert len(rows) == len(DTYPES)
    for code, name, bits, width, exponent, nan in rows:
        d = DTYPES[name]
        field = f"{d.exponent[0]}, {d.exponent[1]}" if d.exponent[1] else "–"
        sentinel = f"`{d.nan:0{2 * d.width}X}`" if d.nan is not None else "–"
        assert (int(code), int(bits), int(width), exponent, nan) == (d.code, d.bits, d.width, field, sentinel)


def test_codes_are_given_once():
    assert len({d.code for d in DTYPES.values()}) == len(DTYPES)
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (?:no|yes|those that do not change) \|", REGISTRY, re.MULTILINE)
    assert [(int(code), name) for code, name in rows] == sorted((codec.code, codec.name) for codec in CODECS)


# Error codes

EXITS = {c.__name__: c.exit_code for c in importlib.import_module("deltackpt.errors").DeltackptError.__subclasses__()}
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+|grid|padding|usage")


def codes_of(tree):
    """(code, class or None) that a module raises: first arguments, and what ``code``, ``_CODES`` and ``_WORDS`` get."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            value = node.args[0].value
            if (
                isinstance(value, str)
                and CODE.fullmatch(value)
                and (name in EXITS or "refuse" in name or "error" in name)
            ):
                yield value, name if name in EXITS else None
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if getattr(target, "id", "") == "code":
                constants = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
                yield from ((c, None) for c in constants if isinstance(c, str) and CODE.fullmatch(c))
            elif getattr(target, "id", "") == "_WORDS" and isinstance(node.value, ast.Dict):  # of store/retry.py
                tuples = [v.elts for v in node.value.values if isinstance(v, ast.Tuple)]
                yield from ((code.value, name.id) for name, code, *_ in tuples)
            elif getattr(target, "id", "") == "_CODES" and isinstance(node.value, ast.Dict):
                values = [v.value for v in node.value.values if isinstance(v, ast.Constant)]
                yield from ((c, None) for c in values if isinstance(c, str) and CODE.fullmatch(c))


def raised():
    for folder in ("deltackpt", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from codes_of(ast.parse(path.read_text()))


def test_codes():
    """The registry has what the code raises, and nothing else."""
    exceptions = {kind: name for kind, name, _ in CLASSES}
    found, registered = set(raised()), {(code, exceptions[kind]) for code, kind in ROWS}
    assert {code for code, _ in found} == {code for code, _ in registered}
    assert {(code, name) for code, name in found if name} <= registered
    assert {name: int(code) for _, name, code in CLASSES} == EXITS
    for part in (OF_THE_FORMAT, OF_THE_COMMAND):
        assert sorted(set(part)) == part


def reader_tables():
    """Every row of what a reader checks: its cells."""
    tables = [
        FORMAT.partition("## Reader requirements")[2].partition("### What a reader need not check")[0],
        VERSION1.partition("## What a reader checks")[2],
        STORE.partition("## What a reader checks")[2].partition("\n## ")[0],
    ]
    lines = [line for text in tables for line in text.splitlines() if re.match(r"\|.*\| \d+ \||\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_codes_in_the_text():
    """The codes of the format are those that the texts name; the tables of a reader have one a row."""
    registered = {code for code, _ in OF_THE_FORMAT}
    texts = (FORMAT, VERSION1, STORE, SIGNATURES)
    spans = {span for text in texts for span in re.findall(r"`([a-z]+(?:-[a-z]+)+)`", text)}
    single = {code for code in registered if "-" not in code}
    assert spans - {"deltackpt-digests", "deltackpt-layout", "deltackpt-edge"} == registered - single
    assert single == {"grid", "padding"}
    rows = reader_tables()
    assert len(rows) > 120
    for row in rows:
        assert re.fullmatch(r"`[a-z-]+`|as above|as there|see below", row[-1]), row
    named = {row[-1].strip("`") for row in rows}
    assert {code for code, _ in (row for row in OF_THE_FORMAT)} >= named - {"as above", "as there", "see below"}
    refused = [vector for vector in INDEX if "error" in vector]
    conduct = [vector for vector in refused if vector["kind"] in ("gc", "mirror", "write", "signed")]  # no reader's
    assert {vector["error"] for vector in refused if vector not in conduct} <= named | {"object-missing"}
    assert {vector["error"] for vector in conduct} <= registered


def test_rows_are_numbered():
    """In every table one after the other, for each object or encoding by itself."""
    last = {}
    for row in reader_tables():
        key, number = tuple(row[:-3]), int(row[-3])
        assert number in (1, last.get(key, number - 1) + 1), row
        last[key] = number


# The examples, and the text


BLOCKS = dict(re.findall(r"^```(?:json|hex) (\w+)\n(.+?)\n```", FORMAT, re.MULTILINE | re.DOTALL))


def block(name):
    """The bytes of an object of the overview: JSON as it stands, all else in hex, and each line of JSON as text."""
    lines = BLOCKS[name].split("\n")
    return b"".join(line.encode() if line.startswith("{") else bytes.fromhex(line) for line in lines)


def hex_of(text):
    """The spans of hex in the first column of a table."""
    rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    return "".join(span for row in rows for span in re.findall(r"`([0-9a-f ]+)`", row))


def test_overview():
    """The objects of the overview are those that their records name, and decode to what it says."""
    other, loads = second(), json.loads
    link, manifest = loads(block("ref")), other.parse_manifest(block("manifest"), loads(block("ref"))["id"])
    assert (link["step"], manifest["step"]) == (1, 1)
    files = {"layout": manifest["layout"], "digests": manifest["digests"], "part": manifest["patch"][0]}
    for name, file in files.items():
        data = block(name)
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size"], file["sha256"]), name
    layout = other.parse_layout(block("layout"))
    digests = other.parse_digests(block("digests"), layout, manifest["state"])
    part = other.parse_part(block("part"))
    kind = other.DTYPES["BF16"]
    old = {
        name: other.Tensor(kind, [4, 8], np.arange(start, start + 32, dtype="<u2"))
        for name, start in (("h.0.w", 0x3C00), ("h.1.w", 0x3D00))
    }
    rows = [(name, "BF16", [4, 8], other.sums_of(t.elements)) for name, t in old.items()]
    assert other.state_digest(rows) == manifest["base"] == part.metadata["base"]
    new = other.prove(other.apply_patch(old, [part]), layout, digests)
    changed = {name: (t.elements != old[name].elements).nonzero()[0].tolist() for name, t in new.items()}
    assert changed == {"h.0.w": [5, 13, 27], "h.1.w": [0]}
    table = FORMAT.partition("```hex part")[2].partition("A reader that has step 0")[0]
    spans = hex_of(table)
    data = block("part")
    assert bytes.fromhex(spans) == data[8 + int.from_bytes(data[:8], "little") :]


def entry_of(table, payload, old):
    entry = second().parse_table(table)[0]
    return second().decode_entry(entry, [], payload, old)


def test_examples_of_encodings():
    """A box, a chunk of planes, and a tile of four classes, as the text has them."""
    text = FORMAT.partition("A box, rows 2 and 3")[2].partition("\n## ")[0]
    table = bytes.fromhex("01" + hex_of(text))
    payload = bytes.fromhex(re.findall(r"payload `([0-9a-f ]+)`", text)[0])
    entry = second().parse_table(table)[0]
    assert (entry.boxed, entry.shape, entry.whole, entry.offset) == (True, [2, 2], [4, 2], [2, 0])
    assert entry_of(table, payload, None).tolist() == [0x3F80, 0x3F81, 0x3F82, 0x3F83]

    text = FORMAT.partition("A chunk of 16 BF16 elements")[2].partition("\n## ")[0]
    payload = bytes.fromhex(hex_of(text))
    crc = zlib.crc32(payload).to_bytes(4, "little")
    old = np.arange(0x3C00, 0x3C10, dtype="<u2")
    new = old.copy()
    new[2], new[9] = new[2] + 1, new[9] - 3
    head = b"\1\0\0\1e\5\x0f\1\x10"
    sizes = bytes.fromhex("".join(re.findall(r"are `(\w\w)`, `(\w\w \w\w)`", text)[0]))
    assert (entry_of(head + sizes + crc, payload, old) == new).all()

    text = FORMAT.partition("16 BF16 elements `e`, classes 4")[2].partition("\n## ")[0]
    old_row, new_row = re.findall(r"^(?:old|new)( .+)$", text, re.MULTILINE)
    old = np.array([int(v, 16) for v in old_row.split()], "<u2")
    cells = [new_row[1 + 5 * i : 5 + 5 * i].strip() for i in range(16)]
    new = np.array([int(v, 16) if v else int(old[i]) for i, v in enumerate(cells)], "<u2")
    detail, tile = (bytes.fromhex(v) for v in re.findall(r"detail is `([0-9a-f ]+)`, the tile `([0-9a-f ]+)`", text)[0])
    assert (new != old).sum() == 5
    assert (entry_of(b"\1\0\0\1e\4\x0f\1\x10" + detail, tile, old) == new).all()
    bits = "".join(f"{byte:08b}"[::-1] for byte in tile)
    sentence = re.findall(r"^The bits: (.+)$", text, re.MULTILINE)[0]
    spelled = "".join(re.findall(r"`([01 ]+)`", sentence)).replace(" ", "")
    assert bits.startswith(spelled)
    assert not set(bits[len(spelled) :]) - {"0"}


def test_links():
    for name, text in zip(NAMES, TEXTS, strict=True):
        for file, anchor in re.findall(r"\]\(([\w.-]*)#([\w-]+)\)", text):
            target = (ROOT / "spec" / file).read_text() if file else text
            heads = re.findall(r"^#+ (.+)$", target, re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}, f"{name}: {anchor}"


def test_limits_of_objects(monkeypatch):
    """Above the limits of manifest, layout, edge and digests object nothing is parsed, by either decoder."""
    from deltackpt.errors import FormatError
    from deltackpt.format import edge, layout, manifest
    from deltackpt.format.canonical import MAX_MARKS, loads_strict

    other = second()
    kinds = (
        (manifest, other.parse_manifest, manifest.MAX_MANIFEST),
        (edge, other.parse_edge, edge.MAX_EDGE),
        (layout, other.parse_layout, layout.MAX_LAYOUT),
    )
    marks, text = b"[" + b"," * MAX_MARKS + b"]", b'["' + b"[{," * (MAX_MARKS // 2) + b'"]'
    for module, parse, limit in kinds:
        for data in (marks, bytes(limit + 1)):
            assert code_of(partial(module.decode, data, "here")) == "json-too-long"
            assert code_of(partial(parse, data)) == "json-too-long"
        assert code_of(partial(module.decode, text, "here")) in ("manifest-field", "layout-field")
    with pytest.raises(FormatError):
        loads_strict(b"1234", limit=3, where="here")
    many = b'{"format":"deltackpt-layout","shards":[],"side":[%s],"version":1}' % b",".join(
        [b"0"] * (layout.MAX_FILES + 1)
    )
    with pytest.raises(FormatError) as error:
        layout.decode(many, "here")
    assert error.value.code == "layout-field"
    monkeypatch.setattr(layout, "MAX_TENSORS", 3)
    monkeypatch.setattr(other, "MAX_TENSORS", 3)
    shard = (
        '{"%s":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"%s":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    )
    shards = [{"path": f"{i}", "header": shard % (f"a{i}", f"b{i}")} for i in range(2)]
    data = json.dumps({"format": "deltackpt-layout", "shards": shards, "side": [], "version": 1}).encode()
    assert code_of(lambda: layout.decode(data, "here")) == "layout-field"
    assert code_of(lambda: other.parse_layout(data)) == "layout-field"
    monkeypatch.setattr(layout, "MAX_TENSORS", 4)
    assert len(layout.decode(data, "here").tensors) == 4
    fields = manifest.Fields({"patch": [0] * 100_001}, "here")
    with pytest.raises(FormatError) as error:
        fields.files("patch")
    assert error.value.code == "manifest-field"
