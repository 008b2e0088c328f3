"""What has to hold before a release is published; `make release` asks both in turn, around the build.

python release.py agree     # version and changelog say the same; before anything is built
python release.py try DIST  # what was built installs, and works, where no C compiler is
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent
RELEASED = re.compile(r"^## (\d+\.\d+\.\d+)(?: \S.*)?$", re.M)
SESSION = """
import numpy as np, pathlib
from safetensors.numpy import save_file
for step in range(2):
    pathlib.Path(f"step_{step}").mkdir()
    save_file({"w": np.arange(4096, dtype=np.float16) + np.float16(step)}, f"step_{step}/model.safetensors")
import deltackpt
for step in range(2):
    deltackpt.write(f"step_{step}", "repo")
deltackpt.apply("repo", "out", 1)
assert deltackpt.verify("repo").ok
assert pathlib.Path("out/model.safetensors").read_bytes() == pathlib.Path("step_1/model.safetensors").read_bytes()
"""


def version_of(root: Path) -> str:
    """That of pyproject.toml."""
    return re.findall(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.M)[0]


def disagreements(root: Path) -> list[str]:
    """What pyproject, package and changelog say that does not fit together; nothing if they agree."""
    version, found = version_of(root), []
    package = re.findall(r'^__version__ = "(.+)"$', (root / "deltackpt/__init__.py").read_text(), re.M)
    if package != [version]:
        found.append(f"deltackpt/__init__.py says version {package}, pyproject.toml {version}")
    text = (root / "CHANGELOG.md").read_text()
    pending = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    if pending and (lines := re.findall(r"^- ", pending[1], re.M)):
        found.append(
            f"CHANGELOG.md has {len(lines)} lines under Unreleased: give them the heading of the version that has them"
        )
    released = RELEASED.findall(text)
    if released[:1] != [version]:
        found.append(f"CHANGELOG.md's newest version is {(released or ['none'])[0]}, pyproject.toml's {version}")
    if twice := sorted({one for one in released if released.count(one) > 1}):
        found.append(f"CHANGELOG.md has {', '.join(twice)} twice: a version that was published is not another one")
    return found


def built(dist: Path, version: str) -> tuple[Path, list[Path]]:
    """The source distribution and the wheels of a folder. Raises SystemExit where they are not those of ``version``."""
    sources, wheels = sorted(dist.glob("*.tar.gz")), sorted(dist.glob("*.whl"))
    if len(sources) != 1 or not wheels:
        raise SystemExit(f"{dist} has {len(sources)} source distributions and {len(wheels)} wheels: make wheels")
    for path in [*sources, *wheels]:
        if not path.name.startswith(f"deltackpt-{version}"):
            raise SystemExit(f"{path.name} is not of version {version}")
    for wheel in wheels:
        names = zipfile.ZipFile(wheel).namelist()
        for name in ("deltackpt/kernels/kernels.so", "deltackpt/py.typed", "deltackpt_cli/start.py"):
            if name not in names:
                raise SystemExit(f"{wheel.name} lacks {name}")
    return sources[0], wheels


def try_out(package: Path, kernels: str) -> None:
    """Install into an environment of its own, whose PATH has nothing else; run the command, and a session.

    ``kernels`` is what `deltackpt --version` has to say of them.
    """
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        tools = folder / "venv/bin"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DELTACKPT_")) and k != "CC"}
        environment = {**kept, "PATH": str(tools)}

        def run(*command: str) -> str:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{package.name}: {' '.join(command)[:80]}\n{done.stdout}{done.stderr}")
            return done.stdout

        python = str(tools / "python")
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(package))
        said = run(str(tools / "deltackpt"), "--version")
        if kernels not in said:
            raise SystemExit(f"{package.name}: found {said!r}, expected {kernels!r}")
        run(python, "-c", SESSION)
        print(f"{package.name}: {said.splitlines()[0]}, {kernels}, without a compiler", flush=True)


def main(words: list[str]) -> int:
    """-> the exit status."""
    if words == ["agree"]:
        for problem in (found := disagreements(ROOT)):
            print(problem, file=sys.stderr)
        return 1 if found else 0
    if len(words) == 2 and words[0] == "try":
        source, wheels = built(Path(words[1]), version_of(ROOT))
        for wheel in wheels:
            try_out(wheel.resolve(), "kernels: compiled")
        try_out(source.resolve(), "kernels: numpy")
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
