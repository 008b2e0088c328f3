"""Every code block of the documents runs as it stands, or says what it needs that is not here: those are counted."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from support.doc_blocks import (
    DOCS,
    IMPOSSIBLE,
    POSSIBLE,
    ROOT,
    RUN,
    SHOWN,
    Block,
    begins_with,
    blocks,
    languages,
    pages,
    run,
    tools,
)

PAGES = [page for page in pages() if any(True for _ in blocks(page))]
MOST_THAT_CANNOT = 0.4  # of all blocks: documents that nobody can try are not documents


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def every_block() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_no_block_hides_behind_another_language(page: Path) -> None:
    assert languages(page) <= {*RUN, "sh", *SHOWN}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_block_needs_is_known(page: Path) -> None:
    for block in blocks(page):
        unknown = set(block.needs) - {*IMPOSSIBLE, *POSSIBLE}
        assert not unknown, f"{block.place} needs {unknown}, which tests/support/doc_blocks.py does not know"
        assert block.notes.keys() <= {"needs", "file", "says", "begins with"}, block.place
        assert block.language != "sh" or block.impossible, f"{block.place}: sh is for what cannot run here"


def test_most_blocks_run() -> None:
    """Those that cannot, by what they need: shown with -s."""
    found = every_block()
    cannot = [block for block in found if block.impossible]
    by_need = Counter(need for block in cannot for need in block.needs if need in IMPOSSIBLE)
    print(f"{len(found)} blocks, {len(cannot)} cannot run here: {dict(sorted(by_need.items()))}")
    assert len(found) > 50
    assert len(cannot) <= MOST_THAT_CANNOT * len(found)


@pytest.fixture(scope="session")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nothing")


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the blocks of the first session ran."""
    work, environment = tmp_path_factory.mktemp("session"), tools(tmp_path_factory.mktemp("bin"))
    for block in blocks(DOCS / "start.md"):
        if not block.impossible:
            run(block, work, environment)
    return work


BEGINNINGS = {"nothing": "nothing", "the session": "session"}  # the fixture of each


def readme(work: Path, said: list[str]) -> None:
    assert (work / "restored/config.json").read_bytes() == (work / "step_1/config.json").read_bytes()
    assert (work / "rollout/current/config.json").is_file()


def library(work: Path, said: list[str]) -> None:
    assert said[0].splitlines()[-3:] == ["0", "True True", "step-missing The nearest step is 2."]
    assert (work / "cache/current/config.json").is_file()
    assert (work / "rollout_2/current/config.json").is_file()


def trainer(work: Path, said: list[str]) -> None:
    assert "goes on after 20" in said[-1]
    assert (work / "runs/repo/steps").is_dir()


def disaster(work: Path, said: list[str]) -> None:
    """The copy, the repaired repository and the one begun again are whole, and each block that is to refuse did."""
    assert '"step":2' in (work / "second/refs/main.json").read_text()
    assert (work / "begun_again/refs/main.json").is_file()


EXPECTED = {
    "README.md": readme, "docs/guides/library.md": library, "docs/guides/trainer.md": trainer,
    "docs/operate/disaster.md": disaster,
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In order, in one folder, each in a process of its own."""
    environment, work = tools(tmp_path / "bin"), tmp_path / "work"
    shutil.copytree(request.getfixturevalue(BEGINNINGS[begins_with(page)]), work, symlinks=True)
    mine = [block for block in blocks(page) if not block.impossible]
    said = [run(block, work, environment) for block in mine if not block.missing]
    missing = [need for block in mine for need in block.missing]
    if mine and not said:
        pytest.skip(f"needs {missing[0]}")
    if not missing and (check := EXPECTED.get(name_of(page))):
        check(work, said)


def test_the_table_of_encodings_names_all_of_them() -> None:
    from deltackpt.codecs import CHOICES

    named = re.findall(r"^\| `(\w+)` \|", (DOCS / "tour.md").read_text(), re.M)
    assert set(named) == set(CHOICES) - {"auto"}


def test_links_between_pages_lead_somewhere() -> None:
    """Those of the README and of the examples too, which no site has."""
    for page in pages():
        for target in re.findall(
            r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
        ):
            assert (page.parent / target).exists(), f"{name_of(page)}: {target}"
