"""The flows that tests end at any instant, as scripts of a process of its own, and what must hold afterwards."""

from __future__ import annotations

from pathlib import Path

from deltackpt.cache import Cache, apply_to_cache, open_current
from deltackpt.cache.slot import MappedSlot
from deltackpt.cache.standby import prepare_standby
from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import collect
from deltackpt.compaction.fold import write_anchor
from deltackpt.compaction.plan import plan_compact
from deltackpt.errors import ConflictError
from deltackpt.format.manifest import Link
from deltackpt.publish.write import write
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.verification import verify_repository
from support.chains import NEVER, World, next_state
from support.states import make_checkpoint, tree

FLOWS = ["publish", "keep open", "gc", "compact", "anchor", "apply", "cache", "new cache", "ready"]
FLOWS += ["cache that is ready", "cache by threads"]
KEEP_TWO = Policy(last=2, grace=0)

# Arguments: a flow, a repository, and the folder with `next` (a checkpoint) and `cache` (a managed cache).
SCRIPT = """
import sys
from deltackpt.repository import Repository
what, repo, root = sys.argv[1:]
if what == "publish":
    from deltackpt.publish.write import AnchorPolicy, write
    write(root + "/next", repo, threads=1, anchor=AnchorPolicy(now=True))
elif what == "keep open":
    from deltackpt.repository.writer_lease import writer_lease
    from deltackpt.publish.write import write
    repo = Repository.open(repo)
    with writer_lease(repo):
        write(root + "/next", repo, threads=1)
        write(root + "/next", repo, threads=1)
elif what == "gc":
    from deltackpt.collector.sweep import collect
    from deltackpt.collector.retention import Policy
    collect(Repository.open(repo), Policy(last=2, grace=0))
elif what == "compact":
    from deltackpt.compaction.plan import plan_compact
    plan_compact(Repository.open(repo), levels=(2, 4)).execute(Repository.open(repo), threads=1)
elif what == "anchor":
    from deltackpt.compaction.fold import write_anchor
    repo = Repository.open(repo)
    write_anchor(repo, repo.find(3), threads=1)
elif what == "apply":
    from deltackpt.restore.materialize import apply
    apply(Repository.open(repo), root + "/out", sync=True, threads=1)
elif what == "ready":
    from deltackpt.cache.standby import prepare_standby
    from deltackpt.cache.slot import MappedSlot
    assert prepare_standby(Repository.open(repo), root + "/cache", MappedSlot(), threads=1)
else:
    from deltackpt.cache import apply_to_cache
    cache, threads = root + ("/new" if what == "new cache" else "/cache"), 3 if "threads" in what else 1
    apply_to_cache(Repository.open(repo), cache, threads=threads)
"""


def prepare(root: Path, flow: str) -> tuple[World, list[Link]]:
    """A repository of seven steps, a cache with two slots at the fifth, one of them `ready` if the flow begins so, and
    a checkpoint to publish."""
    made = World(root)
    links = made.run(6)
    if flow == "gc":
        plan_compact(made.repo, levels=(2, 4)).execute(made.repo, threads=1)
    made.publish(made.states[links[-1].id], anchor=NEVER)
    links = [m.link for m in made.repo.log()][::-1]
    for link in links[3:5]:
        apply_to_cache(made.repo, root / "cache", link.step, threads=3 if "threads" in flow else 1)
    if flow == "cache that is ready":
        assert prepare_standby(made.repo, root / "cache", MappedSlot(), threads=1)
    make_checkpoint(root / "next", next_state(made.states[links[-1].id], 5))
    return made, links


def expire_leases(repo: Path) -> None:
    """As if their time were over."""
    for path in (*repo.glob("leases/*"), repo / "gc.json"):
        path.unlink(missing_ok=True)


def check_after(copy: Path, made: World, links: list[Link], flow: str) -> None:
    repo = Repository.open(copy / "repo")
    report = verify_repository(repo, threads=1)
    assert report.ok, report.to_dict()
    made.check(links[-1], repo)
    head = repo.ref()
    assert head is not None
    before = repo.log()[0].step
    if flow in ("publish", "keep open") and before == links[-1].step:
        assert write(copy / "next", copy / "repo", threads=1, anchor=NEVER).step == links[-1].step + 1
    elif flow == "gc":
        collect(repo, KEEP_TWO)
        made.check(links[-2], Repository.open(copy / "repo"))
    elif flow == "compact":
        plan_compact(repo, levels=(2, 4)).execute(repo, threads=1)
        for link in links[::2]:
            made.check(link, repo)
    elif flow == "anchor":
        try:
            write_anchor(repo, links[3], threads=1)
        except ConflictError as error:
            assert error.code == "anchor-exists"
        made.check(links[3], repo)
    elif flow == "apply":
        if not (copy / "out").exists():
            apply(repo, copy / "out", threads=1)
        assert tree(copy / "out") == made.trees[links[-1].id]
    elif flow == "new cache":
        done = apply_to_cache(repo, copy / "new", threads=1)
        assert done.id == links[-1].id
        assert tree(copy / "new" / "current") == made.trees[links[-1].id]
    elif flow in ("cache", "ready", "cache that is ready", "cache by threads"):
        if (copy / "cache" / "ready").is_dir() and Cache(copy / "cache").trusted:
            assert tree(copy / "cache" / "ready") == made.trees[open_current(copy / "cache")[1].id]
        done = apply_to_cache(repo, copy / "cache", threads=1)
        assert done.id == links[-1].id
        assert tree(copy / "cache" / "current") == made.trees[links[-1].id]
    assert verify_repository(Repository.open(copy / "repo"), threads=1).ok
