"""What a repository keeps in memory of its steps."""

import threading

import pytest
from support.chains import World, bare_chain
from support.counting_store import CountingStore

from deltackpt.errors import NotFoundError
from deltackpt.repository import Repository
from deltackpt.repository import manifests as manifests_module
from deltackpt.repository.manifests import ManifestCache
from deltackpt.store import open_store


def test_what_was_published_here_is_not_loaded(tmp_path):
    world = World(tmp_path)
    links = world.run(2)
    store = CountingStore(open_store(str(world.url)))
    world.writer = Repository.at(store)
    done = world.run(1)[-1]
    store.taken()
    assert world.writer.load(done).link == done
    world.writer.confirm(done)
    assert store.taken("steps/")[0] == 0
    world.writer.manifests.cache.clear()
    world.writer.confirm(done)
    assert store.taken("steps/")[0] == 1
    assert world.writer.load(links[0]).step == 0


def test_the_last_ones_are_kept(monkeypatch):
    repo, links = bare_chain(6)
    monkeypatch.setattr(manifests_module, "CACHED", 3)
    cache = ManifestCache()
    for link in links[:4]:
        cache.add(link, repo.load(link))
    assert [link in cache for link in links] == [False, True, True, True, False, False]
    assert cache.get(links[1]) == repo.load(links[1])
    cache.add(links[4], repo.load(links[4]))
    assert [link in cache for link in links] == [False, True, False, True, True, False]
    assert cache.get(links[0]) is None


def test_threads_share_it():
    repo, links = bare_chain(40)
    repo.manifests.cache.clear()
    wrong = []

    def load():
        for _ in range(20):
            wrong.extend(link for link in links if repo.load(link).link != link)
            repo.manifests.cache.clear()

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_step_that_is_gone_is_not_confirmed(tmp_path):
    world = World(tmp_path)
    link = world.run(1)[0]
    repo = world.repo
    repo.load(link)
    repo.store.delete(link.name)
    with pytest.raises(NotFoundError) as error:
        repo.confirm(link)
    assert error.value.code == "object-missing"


def test_another_connection_takes_the_place_of_the_store(tmp_path):
    world = World(tmp_path)
    link = world.run(2)[-1]
    repo = world.repo
    store = CountingStore(repo.store)
    repo.store = store
    assert (repo.ref().link, repo.load(link).link, repo.find(), len(repo.steps())) == (link, link, link, 2)
    assert repo.layout(repo.load(link)).tensors.keys() == repo.digests(repo.load(link)).keys()
    assert {name.split("/")[0] for name, *_ in store.reads} == {"refs", "steps", "states"}
