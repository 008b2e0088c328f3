"""A repository in a store: steps, refs, leases, and which way leads to a step."""

from deltackpt.repository.refs import Ref
from deltackpt.repository.repository import Repository

__all__ = ["Ref", "Repository"]
