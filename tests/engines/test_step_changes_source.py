"""What an engine reads of a step may come from any source: here a publisher's memory."""

from dataclasses import replace

import numpy as np
import pytest
from support.chains import World
from support.memory_carrier import Carrier

from deltackpt.engines.step_changes import StepChanges
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.patch.part import Origin
from deltackpt.publish.sink import EncodedPart
from deltackpt.restore.source import RepositorySource


def test_an_engine_s_changes_come_from_memory(tmp_path):
    """The parts of three steps, which the repository then no longer has."""
    world = World(tmp_path)
    links = world.run(4)
    repo, carrier = world.repo, Carrier(world.repo.id)
    source = RepositorySource(repo)
    plan = repo.resolve(links[3], have=links[0])
    for hop in plan.patches:
        (file,) = hop.files
        data = bytes(source.part(file))
        origin = Origin(hop.repository, hop.end.step, hop.start.id, hop.base)
        carrier.parts[file.name] = EncodedPart(1, origin, (), (data,), len(data))
        repo.store.delete(file.name)
    old, new = (world.states[link.id] for link in (links[0], links[3]))
    with StepChanges(repo, plan, carrier) as moves:
        for name in ("w", "b"):
            dtype, shape, before = old[name]
            words = np.frombuffer(before, np.uint8).copy()
            found = moves.of(name, words.copy(), (dtype, shape))
            found.write_to(words.view(uint(DTYPES[dtype].width)))
            assert words.tobytes() == new[name][2]
    (first,) = plan.patches[0].files
    carrier.parts[first.name] = replace(carrier.parts[first.name], chunks=(bytes(first.size),))
    with pytest.raises(FormatError, match="object-hash"), StepChanges(repo, plan, carrier):
        pass
