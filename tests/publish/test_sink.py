"""A step goes from a writer to a receiver's state by a sink and a source, with a repository between them or without."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.chains import NEVER, World, next_state, small_state
from support.memory_carrier import Carrier, MemorySink, Received
from support.states import State, make_checkpoint

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import difference
from deltackpt.errors import ChainError, FormatError, NotFoundError, StoreError, UsageError
from deltackpt.format.manifest import Link
from deltackpt.format.safetensors_header import head_size, parse_header
from deltackpt.patch.index import PartIndex, table_of
from deltackpt.patch.part import Origin
from deltackpt.patch.source import StepSource, to_host
from deltackpt.publish.encode_batch import Compare, Comparing
from deltackpt.publish.objects import StepObjects
from deltackpt.publish.repository_sink import RepositorySink, StepTarget
from deltackpt.publish.sink import EncodedPart, PartSink, Sink, StepCommit, elements_of, publish_step
from deltackpt.publish.step import EncodeOptions, StepBuilder, digest_all, encode_step
from deltackpt.publish.write import write
from deltackpt.repository import Repository
from deltackpt.repository.writer_lease import publishing
from deltackpt.restore.receive import receive
from deltackpt.restore.source import RepositorySource, hops_between
from deltackpt.store import LocalStore
from deltackpt.util.progress import SILENT
from deltackpt.verification import verify_repository


class Publisher:
    """Publishes states to a carrier, each compared with the one before."""

    def __init__(self, root: Path, carrier: Carrier) -> None:
        self.root, self.carrier = root, carrier
        self.states: list[State] = []

    def directory(self, step: int) -> Path:
        return self.root / f"step{step}"

    def publish(
        self, state: State, part_bytes: int | None = None, compare: Compare = difference, sink: MemorySink | None = None
    ) -> Link:
        step = len(self.states)
        sink = sink or MemorySink(self.carrier, step, part_bytes)
        path = make_checkpoint(self.directory(step), state, side={"config.json": b"{}"})
        with Checkpoint.open(path) as new:

            def encode() -> StepCommit:
                if not step:
                    builder = StepBuilder(digest_all(new, 1, SILENT))
                else:
                    assert self.carrier.newest is not None
                    before = self.carrier.digests(self.carrier.newest)
                    with Checkpoint.open(self.directory(step - 1)) as old:
                        states = Comparing(old, new, before, self.directory(step - 1), compare)
                        builder = encode_step(sink, self.carrier.origin(step), states, EncodeOptions(threads=2))
                return StepCommit(new, builder.digests, builder.counts(elements_of(new)), {"loss": 1})

            link = publish_step(sink, encode)
        self.states.append(state)
        return link


@pytest.fixture
def run(tmp_path: Path) -> tuple[Publisher, list[Link]]:
    """Four steps in a publisher's memory."""
    publisher, state = Publisher(tmp_path, Carrier()), small_state()
    links = [publisher.publish(state)]
    for step in range(1, 5):
        state = next_state(state, step)
        links.append(publisher.publish(state, part_bytes=1 if step % 2 else None))
    return publisher, links


def received(source: StepSource, state: State, start: Link, end: Link) -> dict[str, bytes]:
    return {name: data.tobytes() for name, data in receive(source, Received.of(state), start, end)}


def bytes_of(state: State) -> dict[str, bytes]:
    return {name: data for name, (_, _, data) in state.items()}


def test_steps_reach_a_receiver_without_a_repository(run: tuple[Publisher, list[Link]]) -> None:
    """One after the other, each from the state that the one before left, and several at once."""
    publisher, links = run
    carrier, states = publisher.carrier, publisher.states
    assert carrier.latest() == links[-1]
    state = Received.of(states[0])
    for step in range(1, len(links)):
        layout = carrier.layout(links[step])
        data = dict(receive(carrier, state, links[step - 1], links[step]))
        state = Received(layout.tensors, data)
        assert {name: array.tobytes() for name, array in data.items()} == bytes_of(states[step])
        assert [side.path for side in layout.side] == ["config.json"]
    assert received(carrier, states[0], links[0], links[-1]) == bytes_of(states[-1])
    assert received(carrier, states[2], links[2], links[2]) == bytes_of(states[2])


def test_the_repository_is_a_source_as_any_other(tmp_path: Path) -> None:
    world = World(tmp_path)
    links = world.run(6)
    source = RepositorySource(world.repo)
    assert source.latest() == links[-1]
    for start, end in ((0, 5), (2, 3), (4, 4)):
        have = received(source, world.states[links[start].id], links[start], links[end])
        assert have == bytes_of(world.states[links[end].id])


def test_a_carrier_takes_the_bytes_that_a_repository_does(tmp_path: Path) -> None:
    """The same states, origin and options give the same parts, digests and state digest, wherever they go."""
    world = World(tmp_path / "world")
    first, second = world.run(2)
    repo = world.repo
    old, new = repo.load(first), repo.load(second)
    carrier = Carrier(repo.id)
    publisher = Publisher(tmp_path, carrier)
    publisher.publish(world.states[first.id])
    (record, *rest) = carrier.steps.pop(carrier.newest)  # type: ignore[arg-type]
    assert record.state == old.state
    carrier.newest = first  # a repository's step and a carrier's are one if their state digests are
    carrier.steps[first] = (record, *rest)  # type: ignore[assignment]
    link = publisher.publish(world.states[second.id])
    assert carrier.step(link).state == new.state
    assert [(f.size, f.sha256) for f in carrier.step(link).parts or ()] == [(f.size, f.sha256) for f in new.patch or ()]
    assert carrier.digests(link) == repo.digests(new)


def test_parts_are_handed_over_while_later_ones_are_encoded(tmp_path: Path) -> None:
    publisher, state = Publisher(tmp_path, Carrier()), {f"t{i:02d}": small_state(i)["w"] for i in range(60)}
    publisher.publish(state)
    compared, seen = [], []

    def compare(*args: object) -> object:
        compared.append(args[0])
        return difference(*args)  # type: ignore[arg-type]

    class Watched(MemorySink):
        def put(self, part: EncodedPart) -> None:
            seen.append((len(compared), part.number, [e.name for e in part.entries]))
            assert part.sha256 == hashlib.sha256(b"".join(part.host_chunks())).hexdigest()
            assert part.size == sum(len(chunk) for chunk in part.host_chunks())
            super().put(part)

    changed = {name: next_state({**small_state(), "w": value}, 1)["w"] for name, value in state.items()}
    publisher.publish(changed, compare=compare, sink=Watched(publisher.carrier, 1, part_bytes=1))  # type: ignore[arg-type]
    assert [number for _, number, _ in seen] == list(range(1, 61))
    assert [name for *_, names in seen for name in names] == sorted(state)
    assert seen[0][0] < len(state)


@pytest.mark.parametrize(
    "error", [StoreError("store-io", where="x", have="x", need="x"), KeyboardInterrupt()], ids=repr
)
@pytest.mark.parametrize("at", ["compare", "commit"])
def test_a_step_that_fails_leaves_nothing(run: tuple[Publisher, list[Link]], at: str, error: BaseException) -> None:
    publisher, links = run
    carrier = publisher.carrier
    parts, steps = dict(carrier.parts), dict(carrier.steps)
    sink = MemorySink(carrier, len(links), part_bytes=1)
    left = [2]

    def compare(*args: object) -> object:
        left[0] -= 1
        if not left[0]:
            raise error
        return difference(*args)  # type: ignore[arg-type]

    if at == "commit":
        sink.fails = error  # type: ignore[assignment]
    new = {
        name: (d, s, bytes(np.frombuffer(data, np.uint8) ^ 1)) for name, (d, s, data) in publisher.states[-1].items()
    }
    with pytest.raises(type(error)):
        publisher.publish(new, compare=compare if at == "compare" else difference, sink=sink)  # type: ignore[arg-type]
    assert (carrier.parts, carrier.steps, carrier.latest()) == (parts, steps, links[-1])


def test_what_a_carrier_garbles_is_found(run: tuple[Publisher, list[Link]]) -> None:
    publisher, links = run
    carrier, states = publisher.carrier, publisher.states

    def code(start: int = 0, end: int = -1) -> str:
        with pytest.raises((ChainError, FormatError, NotFoundError)) as caught:
            received(carrier, states[start], links[start], links[end])
        return str(caught.value.code)

    name, part = next(iter(carrier.parts.items()))
    last = bytes(to_host(part.chunks[-1]))
    carrier.parts[name] = EncodedPart(
        part.number, part.origin, part.entries, (*part.chunks[:-1], bytes([last[0] ^ 1]) + last[1:]), part.size
    )
    assert code() == "object-hash"
    carrier.parts[name] = part
    record, layout, digests = carrier.steps[links[-1]]
    carrier.steps[links[-1]] = record, layout, carrier.steps[links[0]][2]
    assert code() == "digests-shape"
    carrier.steps[links[-1]] = record, layout, {**digests, "w": digests["b"]}
    assert code() == "state-differs"
    carrier.steps[links[-1]] = replace(record, state="0" * 64), layout, digests
    assert code() == "state-differs"
    carrier.steps[links[-1]] = record, layout, digests
    with pytest.raises((ChainError, FormatError)):  # another state than the patches apply to
        received(carrier, states[1], links[0], links[-1])
    assert code(2, 1) == "chain-broken"
    assert hops_between(carrier, links[1], links[1]) == ()
    del carrier.steps[links[1]]
    assert code() == "object-missing"


def test_a_part_is_read_by_ranges(run: tuple[Publisher, list[Link]]) -> None:
    """Header and table say which bytes a tensor has: a receiver asks for these alone."""
    publisher, links = run
    carrier = publisher.carrier
    for file in carrier.step(links[2]).parts or ():
        (head,) = carrier.ranges(file, [(0, 8)])
        size = head_size(bytes(head), file.size, file.name)
        header = parse_header(bytes(carrier.ranges(file, [(0, size)])[0]), file.size, file.name)
        table = carrier.ranges(file, [table_of(header, file.name)])[0]
        index = PartIndex(header, table, file.name)
        assert [e.name for e in index.entries] == [e.name for e in carrier.parts[file.name].entries]
        spans = [index.payload(entry) for entry in index.entries]
        whole = carrier.part(file)
        assert [bytes(b) for b in carrier.ranges(file, spans)] == [bytes(whole[a:b]) for a, b in spans]


def test_a_repository_reads_ranges_too(tmp_path: Path) -> None:
    world = World(tmp_path)
    *_, last = world.run(2)
    source = RepositorySource(world.repo)
    (file,) = source.step(last).parts or ()
    whole = bytes(source.part(file))
    assert hashlib.sha256(whole).hexdigest() == file.sha256
    assert source.ranges(file, [(8, 24), (3, 3), (0, 8)]) == [whole[8:24], b"", whole[:8]]


class OnDevice:
    """Bytes that are not in host memory, as far as the one who takes them knows."""

    def __init__(self, data: bytes) -> None:
        self._array = np.frombuffer(data, np.uint8)
        self.nbytes = len(data)
        self.copies = 0

    def __dlpack__(self, *, stream: object = None) -> object:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # CUDA, the first one

    def to_host(self) -> bytes:
        self.copies += 1
        return self._array.tobytes()


class Devices:
    """Hands every part on as one whose bytes are on a device."""

    def __init__(self, sink: RepositorySink) -> None:
        self.sink, self.moved = sink, list[OnDevice]()

    def part_bytes(self, most: int) -> int:
        return self.sink.part_bytes(most)

    def put(self, part: EncodedPart) -> None:
        chunks = tuple(OnDevice(bytes(chunk)) for chunk in part.host_chunks())
        self.moved.extend(chunks)
        there = EncodedPart(part.number, part.origin, part.entries, chunks, part.size, part.sha256)
        assert there.sha256 == part.sha256
        self.sink.put(there)


def test_parts_in_an_accelerator_s_memory_reach_a_repository(tmp_path: Path) -> None:
    """A sink that writes to a store copies them; their sha256 is the one that was known, and no second copy is made."""
    world = World(tmp_path)
    first, second = world.run(2)
    repo, state = world.repo, world.states[second.id]
    manifest = repo.load(second)
    old = make_checkpoint(tmp_path / "old", state)
    new = make_checkpoint(tmp_path / "new", next_state(state, 9))
    with publishing(repo, second) as lease, Checkpoint.open(old) as before, Checkpoint.open(new) as after:
        sink = RepositorySink(StepObjects(repo, 2), StepTarget("main", repo.ref(), second, manifest), lease, NEVER)
        devices, origin = Devices(sink), Origin(repo.id, 2, second.id, manifest.state)

        def encode() -> StepCommit:
            states = Comparing(before, after, repo.digests(manifest), old)
            builder = encode_step(devices, origin, states, EncodeOptions())
            return StepCommit(after, builder.digests, builder.counts(elements_of(after)), {})

        done = publish_step(sink, encode)
    assert {chunk.copies for chunk in devices.moved} == {1}
    assert bytes(to_host(devices.moved[0])) == devices.moved[0].to_host()
    assert verify_repository(world.repo, threads=1).ok
    have = received(RepositorySource(world.repo), world.states[first.id], first, done.link)
    assert have == bytes_of(next_state(state, 9))


def test_a_commit_that_may_have_taken_effect_withdraws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    world.run(2)
    path = make_checkpoint(tmp_path / "next", next_state(small_state(), 5))

    def unclear(*_: object) -> None:
        raise StoreError("store-io", where="x", have="no answer", need="an answer")

    monkeypatch.setattr(LocalStore, "swap", unclear)
    with pytest.raises(StoreError):
        write(path, world.url, threads=1)
    monkeypatch.undo()
    (link,) = [link for link in world.repo.steps() if link.step == 2]
    assert {f.name for f in world.repo.load(link).files} <= {o.name for o in world.repo.store.list("")}


def test_an_encoding_that_there_is_not_publishes_nothing(run: tuple[Publisher, list[Link]], tmp_path: Path) -> None:
    publisher, links = run
    carrier = publisher.carrier
    sink = MemorySink(carrier, 9)
    with Checkpoint.open(publisher.directory(3)) as old, Checkpoint.open(publisher.directory(4)) as new:
        states = Comparing(old, new, carrier.digests(links[3]), "x")

        def encode() -> StepCommit:
            encode_step(sink, carrier.origin(9), states, EncodeOptions("gzip"))
            raise AssertionError("not reached")

        with pytest.raises(UsageError):
            publish_step(sink, encode)
    assert carrier.latest() == links[-1]


def takes(part_sink: PartSink, sink: Sink[StepCommit, Link], source: StepSource) -> None:
    """What a type checker is asked: are they what the protocols say?"""


def test_the_protocols_are_met(tmp_path: Path) -> None:
    carrier = Carrier()
    takes(MemorySink(carrier, 0), MemorySink(carrier, 0), carrier)
    source: StepSource = RepositorySource(Repository.open_or_create(tmp_path))
    assert source.latest() is None
