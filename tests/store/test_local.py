"""The local store: the contract, and what only real files and processes can show."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support.store_contract import LIMIT, RACERS, StoreContract, error_code

from deltackpt.errors import ConflictError, DeltackptError, FormatError, NoSpaceError, StoreError
from deltackpt.store import LocalStore, Store
from deltackpt.util.disk import replace_file

INCOMPLETE = ".tmp-0123456789abcdef"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "made" / "by the first put"


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore(root)


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, root: Path) -> Store:
        return LocalStore(root)


class TestWithoutHardLinks(StoreContract):
    @pytest.fixture
    def store(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        def refuse(*args: object, **options: object) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)
        return LocalStore(root)


class TestAskedTwice(StoreContract):
    """As NFS may do what it was asked, lose its answer, and be asked again: the second answer is what is seen."""

    @pytest.fixture
    def store(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        for name in ("link", "unlink", "replace", "rename", "mkdir", "rmdir"):
            monkeypatch.setattr(os, name, partial(_twice, getattr(os, name)))
        return LocalStore(root)


class TestAskedTwiceWithoutHardLinks(TestAskedTwice):
    @pytest.fixture
    def store(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        def refuse(*args: object, **options: object) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "replace", partial(_twice, os.replace))
        monkeypatch.setattr(os, "link", refuse)
        return LocalStore(root)


def _twice(call: Callable[..., None], *args: object, **options: object) -> None:
    call(*args, **options)
    call(*args, **options)


def test_a_file_that_is_replaced_by_a_server_that_was_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", partial(_twice, os.replace))
    for data in (b"one", b"two"):
        replace_file(tmp_path / "small", data, sync=True)
        assert (tmp_path / "small").read_bytes() == data
    monkeypatch.undo()

    def lost(*args: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "gone, and done by nobody")

    monkeypatch.setattr(os, "replace", lost)
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "small", b"three", sync=False)
    assert (tmp_path / "small").read_bytes() == b"two"


# Processes


def start(code: str, root: Path, *args: str) -> subprocess.Popen[str]:
    """Another process, with ``store`` and ``args`` in scope; ready() there waits until go() here."""
    prelude = """
import sys
from deltackpt.errors import ConflictError
from deltackpt.store import LocalStore
store, args = LocalStore(sys.argv[1]), sys.argv[2:]
def ready():
    print("ready", flush=True)
    sys.stdin.readline()
"""
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, str(root), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
    )


def race(code: str, root: Path) -> list[str]:
    """What RACERS processes that start together print."""
    racers = [start(code, root, str(i)) for i in range(RACERS)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    printed = [racer.communicate(timeout=60)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * RACERS
    return printed


def test_of_racing_processes_one_creates_and_each_swap_counts_once(root: Path, store: LocalStore) -> None:
    store.swap("refs/main", None, b"0")
    code = """
ready()
for step in range(10):
    try:
        store.put(f"steps/{step}/a", [args[0].encode()] * 1000)
        print(step, end=" ")
    except ConflictError as error:
        assert error.code == "object-exists", error
for _ in range(3):
    while True:
        old = store.get("refs/main", 100)
        try:
            store.swap("refs/main", old, b"%d" % (int(old) + 1))
            break
        except ConflictError as error:
            assert error.code == "ref-moved", error
"""
    won = [[int(step) for step in printed.split()] for printed in race(code, root)]
    assert sorted(step for steps in won for step in steps) == list(range(10))
    for racer, steps in enumerate(won):
        for step in steps:
            assert store.get(f"steps/{step}/a", LIMIT) == b"%d" % racer * 1000
    assert store.get("refs/main", 100) == b"%d" % (3 * RACERS)
    assert not list(store.temporaries())


def test_folders_come_and_go_under_racing_processes(root: Path, store: LocalStore) -> None:
    code = """
ready()
for step in range(20):
    store.put(f"patches/shared/{args[0]}-{step}", [b"x"])
    store.delete(f"patches/shared/{args[0]}-{step}")
"""
    race(code, root)
    assert not list(store.list(""))
    assert sorted(path.name for path in root.iterdir()) == [".lock", "patches"]
    assert not list((root / "patches").iterdir())


def test_a_killed_put_leaves_a_temporary_and_nothing_else(root: Path, store: LocalStore) -> None:
    code = """
def chunks():
    yield b"half"
    ready()
    yield b"never"
store.put("patches/1-a/part", chunks())
"""
    writer = start(code, root)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert not list(store.list(""))
    (left,) = store.temporaries()
    assert left.name.startswith("patches/1-a/.tmp-")
    assert left.size == 4
    assert left.modified <= store.now()
    store.put("patches/1-a/part", [b"whole"])
    store.delete(left.name)
    assert not list(store.temporaries())
    assert store.get("patches/1-a/part", LIMIT) == b"whole"


def test_the_lock_of_a_killed_process_is_free(root: Path, store: LocalStore) -> None:
    store.swap("refs/main", None, b"0")
    holder = start("with store._locked():\n    ready()", root)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    holder.kill()
    holder.communicate()
    store.swap("refs/main", b"0", b"1")


# What stands where an object should be


def every_read(store: Store, name: str) -> list[str]:
    calls = [
        lambda: store.get(name, LIMIT),
        lambda: store.get_range(name, 0, 1),
        lambda: list(store.read(name)),
        lambda: store.stat(name),
        lambda: store.local_path(name),
    ]
    return [error_code(call, FormatError) for call in calls]


@pytest.fixture
def secret(tmp_path: Path, root: Path) -> Path:
    root.mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    return tmp_path / "outside" / "secret"


def test_a_symlink_is_not_followed(root: Path, store: LocalStore, secret: Path) -> None:
    (root / "link").symlink_to(secret)
    (root / "broken").symlink_to(root / "nowhere")
    for name in ("link", "broken"):
        assert set(every_read(store, name)) == {"object-not-a-file"}
        assert error_code(partial(store.put, name, [b"x"]), ConflictError) == "object-exists"
        assert error_code(partial(store.swap, name, b"secret", b"x"), FormatError) == "object-not-a-file"
        assert error_code(partial(store.swap, name, None, b"x"), FormatError) == "object-not-a-file"
    assert [info.name for info in store.list("")] == ["broken", "link"]  # who lists is told that something is there
    store.delete("link")
    assert secret.read_bytes() == b"secret"


def test_a_symlink_to_a_folder_is_not_followed(root: Path, store: LocalStore, secret: Path) -> None:
    (root / "folder").symlink_to(secret.parent)
    assert set(every_read(store, "folder/secret")) == {"object-not-a-file"}
    for call in (
        lambda: store.put("folder/a", [b"x"]),
        lambda: store.put("folder/b/c", [b"x"]),
        lambda: store.swap("folder/secret", b"secret", b"x"),
        lambda: store.delete("folder/secret"),
        lambda: list(store.list("folder/")),
    ):
        assert error_code(call, FormatError) == "object-not-a-file"
    assert [info.name for info in store.list("")] == ["folder"]
    assert not list(store.temporaries())
    assert [path.name for path in secret.parent.iterdir()] == ["secret"]
    assert secret.read_bytes() == b"secret"


def test_a_fifo_does_not_hang(root: Path, store: LocalStore) -> None:
    root.mkdir(parents=True)
    os.mkfifo(root / "fifo")
    assert set(every_read(store, "fifo")) == {"object-not-a-file"}
    assert error_code(lambda: store.put("fifo", [b"x"]), ConflictError) == "object-exists"
    assert [info.name for info in store.list("")] == ["fifo"]
    store.delete("fifo")
    store.put("fifo", [b"a file now"])


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd")], ids=["fifo", "symlink"])
def test_a_file_exchanged_after_the_first_look_is_not_read(root: Path, make: Callable[[Path], None]) -> None:
    class Exchanged(LocalStore):
        def _regular(self, name: str, info: os.stat_result) -> os.stat_result:
            looked = super()._regular(name, info)
            (root / name).unlink()
            make(root / name)
            return looked

    LocalStore(root).put("a", [b"x"])
    with pytest.raises((FormatError, StoreError)):
        Exchanged(root).get("a", LIMIT)


def test_a_taken_name_is_refused_before_the_body_is_made(store: LocalStore) -> None:
    store.put("a", [b"x"])
    assert error_code(lambda: store.put("a", (pytest.fail(str(i)) for i in range(9))), ConflictError) == "object-exists"


def test_the_root_may_be_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    LocalStore(tmp_path / "root").put("a/b", [b"x"])
    assert (tmp_path / "disk" / "a" / "b").read_bytes() == b"x"


def test_an_object_is_no_folder(store: LocalStore) -> None:
    store.put("a", [b"x"])
    store.put("b/c", [b"x"])
    assert error_code(lambda: store.put("a/b", [b"x"]), ConflictError) == "object-exists"
    assert error_code(lambda: store.put("b", [b"x"]), ConflictError) == "object-exists"
    assert not list(store.list("a/"))


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / "file")
    for call in (
        lambda: store.put("a", [b"x"]),
        lambda: store.get("a", 1),
        lambda: list(store.list("")),
        lambda: store.swap("a", b"x", b"y"),
    ):
        assert error_code(call, StoreError) == "store-io"


def test_list_yields_names_that_can_be_used(root: Path, store: LocalStore) -> None:
    store.put("fine", [b"x"])
    for name in (b"a:b", b"a\\b", b"\xff", b"a\nb", INCOMPLETE.encode(), b".tmp-not ours"):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(b"")
    (root / ".tmp-folder").mkdir()
    (root / ".tmp-folder" / "a").write_bytes(b"")
    assert [info.name for info in store.list("")] == ["fine"]
    assert [info.name for info in store.temporaries()] == [INCOMPLETE]


# Order, durability, faults of the disk


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The syncs, by the path synced, and the steps that make an object visible, in order."""
    seen: list[str] = []

    def watch(name: str, say: str | None) -> None:
        real = getattr(os, name)

        def call(*args: object, **options: object) -> object:
            if say is None:
                path = Path(f"/proc/self/fd/{args[0]}").readlink()
                seen.append("sync temporary" if path.name.startswith(".tmp-") else f"sync {path.name}")
            else:
                seen.append(say)
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)

    watch("fsync", None)
    watch("link", "link")
    watch("replace", "replace")
    return seen


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc to name what is synced")
def test_everything_is_synced_in_order_and_nothing_twice(events: list[str], tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "top" / "root")
    store.put("patches/1-a/part", [b"x"] * 5)
    new_root = ["sync top", f"sync {tmp_path.name}"]
    published = ["sync temporary", "link", "sync 1-a", "sync patches"]
    assert events == [*new_root, *published, "sync root"]
    events.clear()
    store.put("patches/1-a/other", [b"x"])
    assert events == published
    events.clear()
    store.swap("refs/main", None, b"1")
    assert events == ["sync temporary", "link", "sync refs", "sync root"]
    events.clear()
    store.swap("refs/main", b"1", b"2")
    assert events == ["sync temporary", "replace", "sync refs"]


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (errno.ENOSPC, NoSpaceError, "no-space"),
        (errno.EDQUOT, NoSpaceError, "no-space"),
        (errno.EACCES, StoreError, "store-permission"),
        (errno.EIO, StoreError, "store-io"),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_fails_leaves_nothing(
    root: Path,
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    kind: type[DeltackptError],
    code: str,
) -> None:
    store.swap("refs/main", None, b"1")

    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    assert error_code(lambda: store.put("patches/1/part", [b"x"]), kind) == code
    assert error_code(lambda: store.swap("refs/main", b"1", b"2"), kind) == code
    monkeypatch.undo()
    assert store.get("refs/main", LIMIT) == b"1"
    assert [info.name for info in store.list("")] == ["refs/main"]
    assert not list(store.temporaries())
    assert not (root / "patches" / "1").exists()


def test_short_writes_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, view: real(file, view[:3]))
    store.put("a", [b"0123456789"])
    assert store.get("a", LIMIT) == b"0123456789"


def test_a_file_that_shrinks_while_it_is_read_is_short(root: Path, store: LocalStore) -> None:
    store.put("a", [b"0123456789"])
    pieces = store.read("a", 4)
    assert next(pieces) == b"0123"
    os.truncate(root / "a", 6)
    assert error_code(lambda: next(pieces), FormatError) == "object-short"


def test_a_slow_writers_object_is_dated_when_it_appears(store: LocalStore) -> None:
    store.put("first", [b"x"])

    def chunks() -> Iterator[bytes]:
        yield b"x"
        (temporary,) = store.temporaries()
        os.utime(store.root / temporary.name, (1, 1))

    before = store.now()
    store.put("a", chunks())
    assert before <= store.stat("a").modified <= store.now()


def test_a_put_whose_temporary_was_collected_publishes_nothing(store: LocalStore) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        for left in store.temporaries():
            store.delete(left.name)

    assert error_code(lambda: store.put("a/b/c", chunks()), StoreError) == "store-io"
    assert not list(store.list(""))


def test_a_root_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("a", [b"x"])
    (tmp_path / "root").rename(tmp_path / "old")
    store.put("a", [b"y"])
    assert store.get("a", 1) == b"y"


def test_reading_creates_nothing(root: Path, store: LocalStore) -> None:
    assert not list(store.list(""))
    store.delete("a")
    store.now()
    with pytest.raises(ConflictError):
        store.swap("a", b"1", b"2")
    assert not root.exists()
