"""What a watch publishes, what it waits for, and what it removes."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.states import State, changed, make_checkpoint, random_bytes, tree

from deltackpt.errors import ConflictError, NotFoundError, StoreError, UsageError
from deltackpt.publish.write import AnchorPolicy
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.watch import Watch, WatchOptions
from deltackpt.watch.snapshot import compile_pattern

NEVER = AnchorPolicy(ratio=float("inf"))


def state_of(step: int, run: int = 0) -> State:
    rng = np.random.default_rng(1)
    state: State = {f"t{i}": ("BF16", (40, 30), random_bytes(rng, "BF16", (40, 30))) for i in range(3)}
    for i in range(step):
        rng = np.random.default_rng((run, i))
        state = {name: changed(rng, value, 0.05) for name, value in state.items()}
    return state


class Trainer:
    """Saves steps; ``later`` moves the clock of its files on, as if each save came a second after the one before."""

    def __init__(self, root: Path, marker: str | None = None) -> None:
        self.run_dir, self.repo, self.marker = root / "run", root / "repo", marker
        self.run_dir.mkdir()
        self.clock = 1_700_000_000
        self.said: list[str] = []

    def save(self, step: int, run: int = 0, shards: int = 2) -> Path:
        path = self.run_dir / f"step_{step}"
        shutil.rmtree(path, ignore_errors=True)
        make_checkpoint(path, state_of(step, run), shards=shards, side={"config.json": b"{}"})
        if self.marker:
            (path / self.marker).touch()
        self.clock += 1
        for file in path.iterdir():
            os.utime(file, (self.clock, self.clock))
        return path

    def watch(self, **options) -> Watch:
        options = {"settle": 0.0, "threads": 1, "anchor": NEVER, "marker": self.marker, **options}
        return Watch(self.run_dir, self.repo, WatchOptions(**options), notify=self.said.append)

    def once(self, **options) -> list[int]:
        return [done.step for done in self.watch(**options).run(poll=0.0, once=True)]

    @property
    def steps(self) -> list[int]:
        return [m.step for m in Repository.open(self.repo).log()][::-1]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_what_is_there_is_published_in_order_and_once(trainer, tmp_path):
    for step in (10, 2, 7):
        trainer.save(step)
    assert trainer.once() == [2, 7, 10]
    assert trainer.once() == []
    trainer.save(11)
    assert trainer.once() == [11]
    repo = Repository.open(trainer.repo)
    for step in (2, 7, 10, 11):
        apply(repo, tmp_path / str(step), step)
        assert tree(tmp_path / str(step)) == tree(trainer.run_dir / f"step_{step}")


def test_a_step_that_is_not_whole_holds_up_those_after_it(trainer):
    trainer.save(1)
    shard = trainer.save(2) / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    trainer.save(3)
    shard.write_bytes(whole[:-1])
    assert trainer.once() == [1]
    assert "step_2 and what follows wait: it is not whole" in trainer.said[-1]
    assert trainer.once(abandon=0.0) == [3]
    shard.write_bytes(whole)
    assert trainer.once() == []  # too late: the order is kept
    assert trainer.said[-1] == "step_2 came after a later step was published, and is passed over"


@pytest.mark.parametrize("gone", ["model.safetensors.index.json", "model-00002-of-00002.safetensors"])
def test_shards_and_their_index_come_together(trainer, gone):
    (trainer.save(1) / gone).unlink()
    assert trainer.once() == []
    trainer.save(1)
    assert trainer.once() == [1]


def test_one_shard_of_two_without_an_index_is_not_a_checkpoint(trainer):
    path = trainer.save(1)
    (path / "model.safetensors.index.json").unlink()
    (path / "model-00002-of-00002.safetensors").unlink()
    assert trainer.once() == []
    assert "one of several" in trainer.said[-1]


def test_a_file_filled_through_a_mapping_is_hashed_twice(trainer, monkeypatch):
    """Its size, time and index are right from the start; only its bytes tell."""
    path = trainer.save(1)
    shard = next(path.glob("*1-of-*.safetensors"))
    watch = trainer.watch()
    assert watch.turn() is None  # hashed for the first time
    info, data = shard.stat(), bytearray(shard.read_bytes())
    data[-3] ^= 1
    with shard.open("r+b") as file:
        file.write(data)
    os.utime(shard, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert watch.turn() is None  # other bytes: not yet
    assert watch.turn().step == 1


def test_a_marker_vouches_and_an_old_one_does_not(tmp_path):
    trainer = Trainer(tmp_path, "STABLE")
    path = trainer.save(1)
    (path / "STABLE").unlink()
    assert trainer.once() == []
    assert "there is no STABLE" in trainer.said[-1]
    (path / "STABLE").touch()
    assert trainer.once(settle=1e9) == [1]
    path = trainer.save(2)
    os.utime(path / "STABLE", (1, 1))  # of an earlier save into the same place
    watch = trainer.watch(settle=1e9)
    assert watch.turn() is None
    assert trainer.once(settle=0.0) == [2]


def test_a_rewritten_step_stops_it_or_is_followed_back(trainer, tmp_path):
    for step in range(1, 6):
        trainer.save(step)
    assert trainer.once() == [1, 2, 3, 4, 5]
    os.utime(next(trainer.save(2).glob("*.safetensors")))  # saved again, the same
    assert trainer.once() == []
    trainer.save(3, run=1)
    with pytest.raises(ConflictError) as error:
        trainer.once()
    assert error.value.code == "watch-rewritten"
    assert trainer.steps == [1, 2, 3, 4, 5]
    assert trainer.once(rewind=True) == [3]  # 4 and 5 are of the run that was left
    assert trainer.steps == [1, 2, 3]
    assert trainer.once(rewind=True) == []
    trainer.save(4)  # the same weights as before, but saved anew
    trainer.save(5, run=1)
    assert trainer.once() == [4, 5]
    assert trainer.steps == [1, 2, 3, 4, 5]
    for step in (3, 4, 5):
        apply(Repository.open(trainer.repo), tmp_path / str(step), step)
        assert tree(tmp_path / str(step)) == tree(trainer.run_dir / f"step_{step}")


def test_a_trainer_that_went_on_while_nobody_watched(trainer):
    for step in range(1, 5):
        trainer.save(step)
    assert trainer.once() == [1, 2, 3, 4]
    for step in (3, 4, 5):
        trainer.save(step, run=1)
    assert trainer.once(rewind=True) == [3, 4, 5]
    assert trainer.steps == [1, 2, 3, 4, 5]


def test_the_first_step_cannot_be_followed_back(trainer):
    trainer.save(1)
    trainer.once()
    trainer.save(1, run=1)
    (trainer.run_dir / "step_1/model.safetensors").write_bytes(b"")
    shutil.rmtree(trainer.run_dir / "step_1")
    make_checkpoint(trainer.run_dir / "step_1", state_of(7), shards=2)
    with pytest.raises(ConflictError):
        trainer.once(rewind=True)


def test_pruned_are_those_that_the_repository_gives_back(trainer, tmp_path):
    for step in range(1, 7):
        trainer.save(step)
    trees = {step: tree(trainer.run_dir / f"step_{step}") for step in range(1, 7)}
    assert trainer.once(prune_dense=2) == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in trainer.run_dir.iterdir()) == ["step_5", "step_6"]
    for step, need in trees.items():
        apply(Repository.open(trainer.repo), tmp_path / str(step), step)
        assert tree(tmp_path / str(step)) == need
    assert trainer.once(prune_dense=2) == []


def test_nothing_is_pruned_that_is_damaged_unpublished_or_of_another_run(trainer):
    for step in (1, 2, 3):
        trainer.save(step)
    assert trainer.once() == [1, 2, 3]
    (part,) = trainer.repo.glob("patches/00000002-*/part-*.safetensors")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert trainer.once(prune_dense=1) == []
    assert sorted(path.name for path in trainer.run_dir.iterdir()) == ["step_2", "step_3"]
    assert any("step 2 is kept" in text for text in trainer.said)


def test_a_killed_removal_leaves_nothing_that_is_taken_for_a_step(trainer):
    for step in (1, 2):
        trainer.save(step)
    trainer.once()
    (trainer.run_dir / "step_1").rename(trainer.run_dir / ".pruned-step_1-00")
    (trainer.run_dir / ".pruned-step_1-00/model-00001-of-00002.safetensors").unlink()
    assert trainer.once(prune_dense=1) == []
    assert [path.name for path in trainer.run_dir.iterdir()] == ["step_2"]


def test_a_directory_that_changes_at_the_last_moment_is_not_removed(trainer):
    for step in (1, 2):
        trainer.save(step)
    watch = trainer.watch(prune_dense=1)
    from deltackpt.watch.prune import remove
    from deltackpt.watch.snapshot import scan

    sight = scan(trainer.run_dir, compile_pattern("step_{step}"))[0]
    (trainer.run_dir / "step_1/config.json").write_text("{ }")
    assert not remove(sight)
    assert (trainer.run_dir / "step_1").exists()
    assert watch.root == trainer.run_dir


def test_a_step_published_by_hand_is_known_by_its_bytes(trainer):
    from deltackpt.publish.write import write

    write(trainer.save(1), trainer.repo, step=1)
    trainer.save(2)
    assert trainer.once() == [2]


def test_two_watches_share_the_work(trainer):
    for step in range(1, 5):
        trainer.save(step)
    one, two = trainer.watch(), trainer.watch()
    found = [done.step for _ in range(12) for watch in (one, two) if (done := watch.turn()) is not None]
    assert found == [1, 2, 3, 4]
    assert trainer.steps == found


def test_a_store_that_does_not_answer_is_tried_again(trainer, monkeypatch):
    trainer.save(1)
    watch, turn, failures = trainer.watch(), Watch.turn, [StoreError("store-io", where="s", have="x", need="y")] * 2

    def flaky(self):
        if failures:
            raise failures.pop()
        return turn(self)

    monkeypatch.setattr(Watch, "turn", flaky)
    assert next(watch.run(poll=0.001)).step == 1
    assert trainer.said[0] == "the store does not answer, trying again: x"
    failures.append(StoreError("store-io", where="s", have="x", need="y"))
    with pytest.raises(StoreError):
        next(watch.run(poll=0.001, once=True))


def test_names(trainer, tmp_path):
    assert compile_pattern("checkpoint-{step}-x").fullmatch("checkpoint-0012-x")[1] == "0012"
    assert compile_pattern("iter_{step}/hf").fullmatch("iter_7/hf")[1] == "7"
    for pattern in ("step", "{step}{step}", "/a/{step}", "../{step}", "a//{step}", "{step}/", ".{step}", "{step}/.a"):
        with pytest.raises(UsageError) as error:
            compile_pattern(pattern)
        assert error.value.code == "watch-pattern"
    with pytest.raises(NotFoundError):
        next(Watch(tmp_path / "none", trainer.repo).run(once=True))
    trainer.save(1)
    shutil.copytree(trainer.run_dir / "step_1", trainer.run_dir / "step_01")
    with pytest.raises(ConflictError) as twice:
        trainer.once()
    assert twice.value.code == "watch-twice"
    with pytest.raises(UsageError):
        trainer.watch(prune_dense=0)
