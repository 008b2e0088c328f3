"""What a remote store remembers of small objects, with many threads that read."""

from collections import OrderedDict
from threading import Thread
from types import SimpleNamespace

from deltackpt.store.remote import RemoteStore


class Slow(OrderedDict):
    """Lets another thread do what it likes in the middle of a change."""

    meanwhile = staticmethod(lambda: None)

    def move_to_end(self, key, last=True):
        other = Thread(target=self.meanwhile)
        other.start()
        other.join(0.1)
        super().move_to_end(key, last)


def test_threads_that_read_and_swap_the_same_object():
    store = RemoteStore(SimpleNamespace(capabilities=SimpleNamespace(swap=True)), "s3://bucket")
    store._recent = Slow()
    store._recent.meanwhile = lambda: store._known("refs/main.json", b"old")
    store._remember("refs/main.json", b"old", "tag")
