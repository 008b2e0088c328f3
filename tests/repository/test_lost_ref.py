"""A ref that is gone is told of; nobody begins anew beside the steps that it led to."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chains import World

from deltackpt.errors import NotFoundError
from deltackpt.report.log import log
from deltackpt.repository import Repository
from deltackpt.verification import verify_repository


def test_a_lost_ref_is_no_beginning(tmp_path: Path) -> None:
    world = World(tmp_path)
    links = world.run(3)
    (tmp_path / "repo" / "refs" / "main.json").unlink()
    for ask in (lambda: log(world.repo), lambda: world.repo.find("latest"), lambda: world.repo.find(1)):
        with pytest.raises(NotFoundError, match="no ref at all, and steps up to 2") as caught:
            ask()
        assert caught.value.code == "ref-missing"
        assert f"--resume-from 2-{links[2].id[:12]}" in caught.value.hint
    with pytest.raises(NotFoundError, match="no ref at all"):
        world.publish(world.states[links[2].id])
    assert world.repo.steps() == links
    assert world.repo.find(f"1-{links[1].id[:12]}") == links[1]
    done = world.publish(world.states[links[2].id], resume_from=f"2-{links[2].id[:12]}")
    assert (done.step, done.parent) == (3, 2)
    assert world.repo.find(1) == links[1]


def test_steps_without_parents_are_of_publishes_that_were_killed(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(1)
    (tmp_path / "repo" / "refs" / "main.json").unlink()
    assert log(world.repo).steps == ()
    assert world.publish(world.states[world.repo.steps()[0].id]).step == 0


def test_verify_tells_of_a_lost_ref_and_of_a_damaged_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(3)
    ref = tmp_path / "repo" / "refs" / "main.json"
    for damage, code in ((ref.unlink, "ref-missing"), (lambda: ref.write_text("{"), "json-syntax")):
        damage()
        (finding,) = verify_repository(Repository.open(tmp_path / "repo"), threads=1).findings
        assert finding.code == code
        assert "deltackpt mirror MIRROR REPO" in finding.hint
