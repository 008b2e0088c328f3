"""Check everything that can be checked, and report all of it: a repository, one part, or a checkpoint directory."""

from deltackpt.verify.checkpoint import verify_checkpoint
from deltackpt.verify.findings import Finding, VerifyReport
from deltackpt.verify.part import verify_part
from deltackpt.verify.repository import verify_repository

__all__ = ["Finding", "VerifyReport", "verify_checkpoint", "verify_part", "verify_repository"]
