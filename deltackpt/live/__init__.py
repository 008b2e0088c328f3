"""Live sessions: a trainer's steps go from the memory of its ranks into that of running engines, proven, all or none.

The trainer's side is a `Session`, given to its hook; every engine's rank has a `LiveReceiver`:

    with TrainerHook(model, "runs/repo", live=Session("10.0.0.1:7700", token=secret)) as hook: ...

    receiver = join(model, "10.0.0.1:7700", token=secret)
    while serving():
        receiver.receive(timeout=1.0)

One truth: a step that went live is the step that the repository publishes, by state digest. Who falls out, or comes
late, catches up by the repository and takes part in the next step.
"""

from deltackpt.live.events import LiveEvent
from deltackpt.live.receiver import LiveReceiver, LiveStep, join
from deltackpt.live.session import Session

__all__ = ["LiveEvent", "LiveReceiver", "LiveStep", "Session", "join"]
