"""A repository in a store: steps, refs, leases, and which way leads to a step."""

from deltackpt.repository.repository import Ref, Repository

__all__ = ["Ref", "Repository"]
