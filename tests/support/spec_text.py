"""The texts of spec/, and what is read from them: the rules by id, and the rows of the registry of error codes."""

import re

from support.vectors import ROOT

FORMAT, STORE, REGISTRY, NOTES = ((ROOT / f"spec/{n}.md").read_text() for n in ("FORMAT", "STORE", "REGISTRY", "NOTES"))
RULE = re.compile(r"^- \*\*\[([FS]-[A-Z]+-\d+)\]\*\* (.+)$", re.MULTILINE)
ROWS = re.findall(r"^\| `([a-z0-9-]+)` \| `(\w+Error)` \| (\d) \| .+ \|$", REGISTRY, re.MULTILINE)  # code, class, exit
