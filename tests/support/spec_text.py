"""The texts of spec/, and what is read from them: the rules by id, and the rows of the registry of error codes."""

import re

from support.vectors import ROOT

NAMES = ("FORMAT", "VERSION1", "STORE", "REGISTRY", "NOTES", "SIGNATURES")
FORMAT, VERSION1, STORE, REGISTRY, NOTES, SIGNATURES = TEXTS = [
    (ROOT / f"spec/{name}.md").read_text() for name in NAMES
]
DECODER = sorted((ROOT / "spec").glob("decode*.py"))
RULE = re.compile(r"^- \*\*\[([FS]-[A-Z]+-\d+)\]\*\* (.+)$", re.MULTILINE)

# Error codes: (class, exception, exit), and (code, class) of the format and of the command alone.
CLASSES = re.findall(r"^\| ([a-z]+) \| `(\w+Error)` \| (\d) \|$", REGISTRY, re.MULTILINE)
OF_THE_FORMAT, OF_THE_COMMAND = (
    re.findall(r"^\| `([a-z0-9-]+)` \| ([a-z]+) \| .+ \|$", text, re.MULTILINE)
    for text in REGISTRY.partition("## Codes of the format")[2].split("## Codes of the command")
)
ROWS = [*OF_THE_FORMAT, *OF_THE_COMMAND]
