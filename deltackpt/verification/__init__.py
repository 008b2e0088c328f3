"""Check everything that can be checked, and report all of it: a repository, one part, or a checkpoint directory."""

from deltackpt.verification.checkpoint import verify_checkpoint
from deltackpt.verification.findings import Finding, VerifyReport
from deltackpt.verification.part import verify_part
from deltackpt.verification.repository import verify_repository

__all__ = ["Finding", "VerifyReport", "verify_checkpoint", "verify_part", "verify_repository"]
