"""Hugging Face checkpoint directories: opened, checked, compared."""

from deltackpt.checkpoint.checkpoint import Checkpoint, Located

__all__ = ["Checkpoint", "Located"]
