"""What goes wrong behind the training: nothing is lost, nothing hangs, nothing is left behind."""

import _thread
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from support.training import Ledger, Net, published, train_step  # noqa: E402

from deltackpt.errors import ConflictError, StoreError, UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.hooks.pending import Pending  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402


class Flaky:
    """A store whose puts or swaps fail while ``fails`` says so, before or after they took effect."""

    def __init__(self, inner):
        self.inner, self.fails, self.after = inner, lambda operation, name: False, False
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def put(self, name, chunks):
        if name.startswith(("patches/", "anchors/")):
            self.gate.wait(20)
        return self._run("put", name, lambda: self.inner.put(name, chunks))

    def swap(self, name, old, new):
        return self._run("swap", name, lambda: self.inner.swap(name, old, new))

    def _run(self, operation, name, call):
        fails = self.fails(operation, name)
        if not fails or self.after:
            result = call()
        if fails:
            raise StoreError("store-io", where=name, have="no answer", need="an answer")
        return result


class Run:
    def __init__(self, tmp_path, **options):
        repo = Repository.open_or_create(tmp_path / "repo")
        self.store = repo.store = Flaky(repo.store)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.ledger = Ledger(tmp_path, tmp_path / "repo")
        self.hook = TrainerHook(self.model, repo, dtype=torch.bfloat16, **{"threads": 1, **options})

    def train(self, step):
        if step:
            train_step(self.model, self.optimizer, step)
        self.ledger.save(step, published(self.model))

    def step(self, step):
        self.train(step)
        self.hook.step(step)


def wait_for_error(hook):
    end = time.monotonic() + 20
    while hook._pending._unseen is None:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("what", ["patches/", "states/", "steps/", "refs/"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("snapshot", ["device", "cache"])
def test_step_k_fails_and_k_plus_1_succeeds(tmp_path, what, after, snapshot):
    run = Run(tmp_path, snapshot=tmp_path / "cache" if snapshot == "cache" else snapshot)
    run.step(0)
    run.step(1)
    run.hook.flush()
    run.store.fails, run.store.after = lambda operation, name: name.startswith(what), after
    run.step(2)
    wait_for_error(run.hook)
    run.store.fails = lambda operation, name: False
    run.train(3)
    with pytest.raises(StoreError, match="no answer"):
        run.hook.step(3)
    run.hook.step(3)
    run.step(4)
    run.hook.close()
    took_effect = after and what == "refs/"  # the swap that was answered by an error: found out the next time
    run.ledger.check([0, 1, *([2] if took_effect else []), 3, 4])


@pytest.mark.parametrize("snapshot", ["device", "cache"])
def test_a_failed_anchor_is_taken_again_at_the_next_step(tmp_path, snapshot):
    run = Run(tmp_path, snapshot=tmp_path / "cache" if snapshot == "cache" else snapshot)
    run.store.fails = lambda operation, name: name.startswith("anchors/")
    run.step(0)
    wait_for_error(run.hook)
    run.store.fails = lambda operation, name: False
    run.train(1)
    with pytest.raises(StoreError):
        run.hook.step(1)
    run.hook.step(1)
    run.step(2)
    run.hook.close()
    run.ledger.check([1, 2])


def test_errors_can_be_carried(tmp_path):
    run = Run(tmp_path, errors="carry")
    run.step(0)
    run.hook.flush()
    run.store.fails = lambda operation, name: name.startswith("patches/")
    for step in (1, 2, 3):
        run.step(step)
    wait_for_error(run.hook)
    run.store.fails = lambda operation, name: False
    run.step(4)
    run.hook.close()
    log = [m.step for m in Repository.open(tmp_path / "repo").log()]
    assert log[0] == 4
    run.ledger.check(sorted(log))


def test_close_tries_once_more_and_then_says_so(tmp_path):
    run = Run(tmp_path)
    run.step(0)
    run.hook.flush()
    run.store.fails = lambda operation, name: name.startswith("patches/")
    run.step(1)
    wait_for_error(run.hook)
    with pytest.raises(StoreError):
        run.hook.close()
    run.ledger.check([0])
    with pytest.raises(UsageError, match="hook-closed"):
        run.hook.step(2)


def test_a_worker_that_breaks_is_told_of(tmp_path, monkeypatch):
    import deltackpt.hooks.parts as module

    run = Run(tmp_path)
    run.step(0)
    run.hook.flush()
    whole = module.entry_of
    monkeypatch.setattr(module, "entry_of", lambda *a, **k: 1 / 0)
    run.step(1)
    wait_for_error(run.hook)
    monkeypatch.setattr(module, "entry_of", whole)
    run.train(2)
    with pytest.raises(ZeroDivisionError):
        run.hook.step(2)
    run.hook.step(2)
    run.hook.close()
    run.ledger.check([0, 2])


def test_a_full_queue_waits_or_merges(tmp_path):
    run = Run(tmp_path, full="merge", queue=2)
    run.step(0)
    run.hook.flush()
    run.store.gate.clear()
    began = time.monotonic()
    for step in range(1, 8):
        run.step(step)  # never waits
    assert time.monotonic() - began < 15
    assert len(run.hook._pending) <= 3
    run.store.gate.set()
    run.hook.close()
    log = sorted(m.step for m in Repository.open(tmp_path / "repo").log())
    assert log[0] == 0
    assert log[-1] == 7
    assert len(log) < 8
    run.ledger.check(log)


def test_a_full_queue_makes_the_step_wait(tmp_path):
    run = Run(tmp_path, queue=1)
    run.step(0)
    run.hook.flush()
    run.store.gate.clear()
    run.step(1)
    threading.Timer(0.3, run.store.gate.set).start()
    run.step(2)
    assert run.store.gate.is_set()
    assert Repository.open(tmp_path / "repo").log()[0].step == 1
    run.hook.close()
    run.ledger.check([0, 1, 2])


def test_a_store_that_does_not_answer_is_told_of(tmp_path):
    run = Run(tmp_path, queue=1)
    run.step(0)
    run.hook.flush()
    run.store.gate.clear()
    run.step(1)
    run.hook._stall = 0.2
    run.train(2)
    with pytest.raises(StoreError, match="publish-stalled"):
        run.hook.step(2)
    run.store.gate.set()
    run.hook._stall = 20
    run.hook.step(2)
    run.hook.close()
    run.ledger.check([0, 1, 2])


@pytest.mark.parametrize("threads", [1, 3])
def test_one_of_several_parts_fails(tmp_path, threads, monkeypatch):
    from deltackpt.publish.objects import StepObjects

    monkeypatch.setattr(StepObjects, "part_bytes", lambda self, most: 1000)
    run = Run(tmp_path, threads=threads)
    run.step(0)
    run.hook.flush()
    run.store.fails = lambda operation, name: name.endswith("part-00003.safetensors")
    run.step(1)
    wait_for_error(run.hook)
    assert not list((tmp_path / "repo").glob("patches/*/*"))
    run.store.fails = lambda operation, name: False
    run.train(2)
    with pytest.raises(StoreError, match="no answer"):
        run.hook.step(2)
    run.hook.step(2)
    run.step(3)
    run.hook.close()
    run.ledger.check([0, 2, 3])
    last = Repository.open(tmp_path / "repo").log()[0]
    assert [file.name[-14:] for file in last.patch[:3]] == [f"{n:02d}.safetensors" for n in (1, 2, 3)]


def test_a_step_during_an_anchor_is_merged(tmp_path):
    run = Run(tmp_path, full="merge")
    run.store.gate.clear()
    run.step(0)
    for step in (1, 2):
        run.step(step)  # the anchor still reads the snapshot
    assert len(run.hook._pending) == 1
    run.store.gate.set()
    run.hook.close()
    run.ledger.check([0, 2])


def test_an_interrupt_while_a_change_is_taken_takes_nothing(tmp_path, monkeypatch):
    import deltackpt.hooks.capture as module

    run = Run(tmp_path)
    run.step(0)
    run.step(1)
    compare, calls = module.compare, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return compare(*args, **options)

    run.train(2)
    monkeypatch.setattr(module, "compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.hook.step(2)
    monkeypatch.setattr(module, "compare", compare)
    run.hook.step(2)
    run.hook.close()
    run.ledger.check([0, 1, 2])


def test_leaving_by_an_exception_leaves_nothing_half_done(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(KeyboardInterrupt), run.hook:  # noqa: PT012
        run.step(0)
        run.hook.flush()
        run.store.gate.clear()
        run.step(1)
        run.step(2)
        threading.Timer(0.2, run.store.gate.set).start()
        raise KeyboardInterrupt
    run.ledger.check([0])
    assert not list((tmp_path / "repo").glob("patches/*/*"))


def test_an_interrupt_of_close_leaves_nothing_half_done(tmp_path):
    run = Run(tmp_path)
    run.step(0)
    run.hook.flush()
    run.store.gate.clear()
    run.step(1)
    threading.Timer(0.2, _thread.interrupt_main).start()
    threading.Timer(0.5, run.store.gate.set).start()
    with pytest.raises(KeyboardInterrupt):
        run.hook.close()
    run.ledger.check([0])
    assert not list((tmp_path / "repo").glob("patches/*/*"))


@pytest.mark.parametrize("snapshot", ["device", "cache"])
@pytest.mark.parametrize("put", [False, True])
def test_an_interrupt_while_a_change_is_handed_over_neither_loses_nor_doubles_it(tmp_path, snapshot, put, monkeypatch):
    run = Run(tmp_path, snapshot=tmp_path / "cache" if snapshot == "cache" else snapshot)
    run.step(0)
    run.step(1)
    run.hook.flush()
    hand_over = Pending.put

    def interrupted(self, item, **options):
        if put:
            hand_over(self, item, **options)
        raise KeyboardInterrupt

    run.train(2)
    monkeypatch.setattr(Pending, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.hook.step(2)
    monkeypatch.setattr(Pending, "put", hand_over)
    assert run.hook.last_step == (2 if put else 1)
    if not put:
        run.hook.step(2)
    run.step(3)
    run.hook.close()
    run.ledger.check([0, 1, 2, 3])


def test_another_writer_on_the_ref(tmp_path):
    run = Run(tmp_path)
    run.step(0)
    run.hook.flush()
    other = TrainerHook(run.model, tmp_path / "repo", dtype=torch.bfloat16, threads=1)
    train_step(run.model, run.optimizer, 1)
    other.step(1)
    other.close()
    run.hook.step(1)
    with pytest.raises(ConflictError, match="ref-moved"):
        run.hook.close()


def test_another_writer_right_after_a_step(tmp_path, monkeypatch):
    """A hook goes on from its own step, and never over one that it finds on the ref by then."""
    run = Run(tmp_path)
    run.step(0)
    run.hook.flush()
    publish = Repository.publish

    def and_another(*args):
        monkeypatch.setattr(Repository, "publish", publish)
        link = publish(*args)
        with TrainerHook(run.model, tmp_path / "repo", dtype=torch.bfloat16, threads=1) as other:
            other.step(2)
        return link

    monkeypatch.setattr(Repository, "publish", and_another)
    run.step(1)
    run.hook.flush()
    run.step(3)
    with pytest.raises(ConflictError, match="ref-moved"):
        run.hook.close()
    assert Repository.open(tmp_path / "repo").find().step == 2


def test_one_lease_for_all_steps(tmp_path):
    names = set()
    run = Run(tmp_path, report=lambda m: names.update(i.name for i in run.store.inner.list("leases/")))
    for step in range(3):
        run.step(step)
        run.hook.flush()
    assert len(names) == 1
    run.hook.close()
    run.ledger.check([0, 1, 2])


def test_steps_rise(tmp_path):
    run = Run(tmp_path)
    run.step(3)
    with pytest.raises(ConflictError, match="step-order"):
        run.hook.step(3)
    run.hook.close()


SCRIPT = """
import sys, torch
from support.training import Net, train_step, published, Ledger
from deltackpt.hooks import TrainerHook
from pathlib import Path
root = Path(sys.argv[1])
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ledger = Ledger(root, root / "repo")
hook = TrainerHook(model, root / "repo", dtype=torch.bfloat16, threads=1)
for step in range(1000):
    if step:
        train_step(model, optimizer, step)
    state = published(model)
    ledger.save(step, state)
    torch.save((step, model.state_dict()), root / "trainer.tmp")
    (root / "trainer.tmp").replace(root / f"trainer-{step}.pt")
    hook.step(step)
    print(step, flush=True)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_trainer_is_resumed(tmp_path, how):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    came = next((line for line in process.stdout if int(line) >= 6), None)
    process.send_signal(how)
    _, told = process.communicate(timeout=60)
    assert came is not None, told
    repo = Repository.open(tmp_path / "repo")
    at = repo.load(repo.ref().link).step
    assert at >= 3
    # The trainer's own checkpoint of the published step; a later one would not be the ref's.
    _, state = torch.load(tmp_path / f"trainer-{at}.pt")
    model = Net(seed=9)
    model.load_state_dict(state)
    ledger = Ledger(tmp_path, tmp_path / "repo")
    with TrainerHook(model, tmp_path / "repo", dtype=torch.bfloat16, threads=1) as hook:
        assert hook.last_step == at
        train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), 0)
        hook.step()
        ledger.save(at + 1, published(model))
    for m in repo.log():
        ledger.check_link(repo, m.link)
    if how == signal.SIGINT:  # it had the time to clean up
        assert not list(repo.store.list("leases/"))
        assert not list(repo.store.temporaries())
