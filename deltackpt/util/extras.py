"""Libraries that only some users need: what pip calls them, and the line that installs one beside deltackpt."""

from __future__ import annotations

import shlex
import sys
from typing import Final

# By the extra of pyproject.toml, which a test holds equal. deltackpt itself is on no index, so a hint that named
# `deltackpt[torch]` would install nothing; these names work wherever deltackpt came from.
REQUIREMENTS: Final = {
    "torch": "torch>=2.2",
    "hub": "huggingface-hub>=1.33",
    "s3": "s3fs>=2024.6",
    "gcs": "gcsfs>=2024.6",
    "azure": "adlfs>=2024.4",
    "interop": "blake3>=0.4",
    "quantize": "compressed-tensors>=0.20",
    "report": "matplotlib>=3.8",
    "sign": "cryptography>=42",
    "nixl": "nixl-cu13>=1.0",
}


def install_line(name: str) -> str:
    """The command that installs an extra, or a library, into the environment that this process runs in."""
    python = shlex.quote(sys.executable or "python3")
    return f"{python} -m pip install {shlex.quote(REQUIREMENTS.get(name, name))}"
