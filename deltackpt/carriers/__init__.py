"""Carriers: ways for the parts of a step from the memory of a publisher's rank to that of a receiver's.

They move what a `Sink` collected and a `PartSource` gives: the same bytes with the same digests. The way through a
store is `publish.repository_sink.RepositorySink` with `restore.source.RepositorySource`; here are those without one.
"""
