"""The names in a cache's directory stand in one module."""

import ast
from pathlib import Path

import pytest
from support.chains import World

from deltackpt.cache import Cache, apply_to_cache
from deltackpt.cache import layout as layout_module
from deltackpt.cache.layout import BUILDING, MAKING, SIDE_DRAFT, CacheLayout, link_of
from deltackpt.engines.update import RankReport, read_reports
from deltackpt.format.manifest import Link
from deltackpt.util.disk import draft_of

ROOT = Path(__file__).parent.parent.parent
LINK = Link(12, "ab" * 32)
PATHS = {name: path for name, path in vars(CacheLayout(Path("cache"))).items() if name != "root"}
NAMES = {path.name for path in PATHS.values()} | {
    SIDE_DRAFT,
    BUILDING,
    ".cache.json",
    ".current",
    ".boot",
    ".told.json",
}
# Words of other things too: `cache / "lock"` is found by the division, a lock's name in another directory is not.
PLAIN = {"current", "ready", "journal", "lock", "boot", "patching"}


def strings(path: Path):
    """(text, whether it is joined to a path) of every string that is no docstring."""
    tree = ast.parse(path.read_text())
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    joined = {id(n.right) for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)}
    joined |= {
        id(arg)
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and getattr(n.func, "attr", "") in ("join", "joinpath", "with_name", "Path")
        for arg in n.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value, id(node) in joined


def names_in(path: Path) -> set[str]:
    found = set()
    for text, joined in strings(path):
        pieces = set(text.split("/"))
        found |= pieces & NAMES if joined else pieces & (NAMES - PLAIN) if "/" not in text else set()
        found |= {text} & (NAMES - PLAIN)
    return found


@pytest.mark.parametrize("room", ["deltackpt", "cli"])
def test_no_other_module_holds_a_name(room):
    own = Path(layout_module.__file__).resolve()
    found = {str(p.relative_to(ROOT)): names_in(p) for p in (ROOT / room).rglob("*.py") if p.resolve() != own}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_search_finds_names(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""journal"""\na = root / "journal"\nb = "told.json"\nc = os.path.join(x, "lock")\nd = "current"\n'
    )
    assert names_in(path) == {"journal", "told.json", "lock"}


def test_every_file_of_a_cache_is_named(tmp_path):
    world = World(tmp_path)
    links = world.run(3)
    for link in links:
        apply_to_cache(world.repo, tmp_path / "cache", f"{link.step}-{link.id}", threads=1)
    layout = CacheLayout(tmp_path / "cache")
    RankReport(rank=1).save(layout.root, "asked")
    known = {path.name for name, path in vars(layout).items() if name != "root"}
    known |= {layout.slot(link).name for link in Cache(layout.root).slots()}
    assert {path.name for path in layout.root.iterdir()} <= known
    assert layout.report("asked", 1).is_file()
    assert [report.rank for report in read_reports(layout.root, "asked")] == [1]
    assert layout.reports("asked") == []


def test_slots_are_named_by_step_and_id():
    assert CacheLayout(Path("x")).slot(LINK) == Path("x") / f"00000012-{LINK.id}"
    assert link_of(CacheLayout(Path("x")).slot(LINK).name) == LINK
    for name in (*MAKING, "ready", "12-ab", "x-" + LINK.id, f"٣-{LINK.id}", ""):
        assert link_of(name) is None


def test_what_is_there_before_the_marker():
    layout = CacheLayout(Path("x"))
    assert {p.name for p in (layout.lock, layout.marker, draft_of(layout.marker), layout.receivers)} == MAKING
