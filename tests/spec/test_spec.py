"""spec/ and the code say the same: rules and vectors, constants, codes, dtypes, the worked example, and the links."""

import ast
import importlib
import json
import re
from functools import partial

import pytest
from support.spec_text import FORMAT, NOTES, REGISTRY, ROWS, RULE, STORE
from support.store_rules import SHOWN_BY
from support.vectors import FIXTURES, INDEX, ROOT, code_of, second

from deltackpt.codecs import CODECS
from deltackpt.format.dtypes import DTYPES

# Rules that no bytes can show: what a writer must do, or what holds for all vectors. Each with the test that shows it.
ELSEWHERE = {
    "F-READ-1": "spec/test_vectors.py::test_parts",
    "F-READ-4": "spec/test_vectors.py::test_parts",
    "F-APPLY-6": "cache/test_cache_readers.py::test_the_directory_that_readers_hold_is_left_alone",
    "F-DOBJ-3": "spec/test_spec.py::test_limits_of_objects",
    "F-JSON-1": "spec/test_spec.py::test_limits_of_objects",
    "F-LAY-5": "spec/test_spec.py::test_limits_of_objects",
    "F-MAN-10": "spec/test_spec.py::test_limits_of_objects",
    "F-TAB-15": "patch/test_remote_part.py::test_a_table_above_the_limit_is_not_asked_for",
    "F-VER-1": "spec/test_spec.py::test_codes_are_given_once",
    "F-WRITE-4": "publish/test_write.py::test_a_checkpoint_that_changes_while_it_is_read",
    "F-WRITE-5": "codecs/test_encodings.py::test_any_change_comes_back",
    "F-WRITE-7": "publish/test_write.py::test_a_base_that_was_edited_by_one_bit",
}


def test_every_rule_has_a_vector_and_every_vector_a_rule():
    rules = dict(RULE.findall(FORMAT))
    shown = {rule for vector in INDEX for rule in vector["rules"]}
    assert shown <= rules.keys()
    assert not shown & ELSEWHERE.keys(), "a vector shows it: take it off the list"
    assert rules.keys() == shown | ELSEWHERE.keys()
    assert all(vector["rules"] for vector in INDEX)


def test_every_rule_of_the_store_has_a_test():
    rules = {rule for rule, text in RULE.findall(STORE) if re.search(r"\bMUST\b", text)}
    assert rules == SHOWN_BY.keys()


@pytest.mark.parametrize("rule", [*ELSEWHERE, *SHOWN_BY])
def test_what_no_vector_shows_has_a_test(rule):
    where = (ELSEWHERE | SHOWN_BY)[rule]
    path, _, name = where.partition("::")
    assert re.search(rf"def {name}\(", (ROOT / "tests" / path).read_text()), where


def test_every_must_has_a_number():
    for text in (FORMAT, STORE):
        for line in text.splitlines():
            if re.search(r"\bMUST\b", line) and not line.startswith("The words MUST"):
                assert RULE.match(line), line
        found = RULE.findall(text)
        assert len(dict(found)) == len(found), "a rule twice"


def test_rules_that_are_named_exist():
    rules = {rule for text in (FORMAT, STORE) for rule, _ in RULE.findall(text)}
    sources = [FORMAT, STORE, NOTES, (ROOT / "spec/decode.py").read_text()]
    for text in sources:
        assert set(re.findall(r"\[([FS]-[A-Z]+-\d+)\]", text)) <= rules


def test_constants():
    rows = re.findall(r"^\| `(\w+) = (.+?)` \| `([\w.]+)` \|", FORMAT, re.MULTILINE)
    assert len(rows) > 40
    for name, value, module in rows:
        assert getattr(importlib.import_module(module), name) == ast.literal_eval(value), f"{module}.{name}"


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
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| 1 \|", REGISTRY, re.MULTILINE)
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
    found, registered = set(raised()), {(code, name) for code, name, _ in ROWS}
    assert {code for code, _ in found} == {code for code, _ in registered}
    assert {(code, name) for code, name in found if name} <= registered
    assert all(EXITS[name] == int(code) for _, name, code in ROWS)
    assert sorted(ROWS) == ROWS


def test_codes_in_the_text():
    registered = {code for code, _, _ in ROWS}
    spans = {span for text in (FORMAT, STORE) for span in re.findall(r"`([a-z]+(?:-[a-z]+)+)`", text)}
    assert spans - registered <= {"deltackpt-digests", "deltackpt-layout", "deltackpt-edge"}
    tables = FORMAT.partition("## Reader requirements")[2].partition("### What a reader need not check")[0]
    named = {span for line in tables.splitlines() if line.startswith("|") for span in re.findall(r"`([a-z-]+)`", line)}
    errors = {
        vector["error"]
        for vector in INDEX
        if "error" in vector and vector["kind"] in ("part", "layout", "manifest", "digests", "edge")
    }
    assert errors <= named | {"json-depth", "json-syntax", "json-number", "json-duplicate-key"}


# The worked example, and the text


def test_worked_example():
    data = (FIXTURES / "valid/worked_example.safetensors").read_bytes()
    dump = ""
    for i in range(0, len(data), 16):
        row = data[i : i + 16]
        hexes = row[:8].hex(" ") + ("  " + row[8:].hex(" ") if row[8:] else "")
        dump += f"{i:04x}  {hexes:<48}  {''.join(chr(c) if 32 <= c < 127 else '.' for c in row)}\n"
    example = FORMAT.partition("## Worked example")[2].partition("## Vectors")[0]
    assert f"The part has {len(data)} bytes:\n\n```\n{dump}```" in example
    for offset, span in re.findall(r"^\| ([0-9a-f]{4}) \| `([0-9a-f ]+)` \|", example, re.MULTILINE):
        expected = bytes.fromhex(span)
        assert data[int(offset, 16) :].startswith(expected), offset


def test_links():
    for name, text in (("FORMAT", FORMAT), ("STORE", STORE), ("REGISTRY", REGISTRY), ("NOTES", NOTES)):
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
    fields = manifest.Fields({"patch": [0] * (manifest.MAX_PARTS + 1)}, "here")
    with pytest.raises(FormatError) as error:
        fields.files("patch")
    assert error.value.code == "manifest-field"
