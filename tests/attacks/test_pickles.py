"""Attack 16: nothing of deltackpt can unpickle, and a pickle that is in the way of a reader is not opened as one."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from support.vectors import ROOT

FORBIDDEN = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pandas"}


class Boom:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("folder", ["deltackpt", "cli"])
def test_no_module_can_unpickle(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {a.name.partition(".")[0] for a in node.names} & FORBIDDEN, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in FORBIDDEN, path
            elif isinstance(node, ast.Call):
                call = ast.unparse(node.func)
                assert call not in ("eval", "exec", "compile", "__import__"), f"{path}: {call}"
                assert call not in ("torch.load", "np.load", "numpy.load"), f"{path}: {call}"
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", path


PROGRAM = """
import sys
seen = []
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith("pickle.") else None)
from pathlib import Path
from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import DeltackptError
from deltackpt.verification import verify_part
from deltackpt.publish.write import write
assert "torch" not in sys.modules
for folder in map(Path, sys.argv[1:]):
    for call in (lambda: Checkpoint.open(folder), lambda: write(folder, folder / "repository")):
        try:
            call()
        except DeltackptError as error:
            print(error.code)
        else:
            print("read")
    for file in folder.glob("*"):
        if file.is_file():
            verify_part(file)
assert not seen, seen
"""


def test_no_pickle_is_opened(tmp_path):
    """Under an audit hook that sees every class that an unpickler looks up."""
    proof = tmp_path / "executed"
    boom = pickle.dumps(Boom(str(proof)))
    folders = []
    for name in ("pytorch_model.bin", "model.safetensors", "model.pt", "checkpoint.ckpt"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_bytes(boom)
        folders.append(str(folder))
    done = subprocess.run([sys.executable, "-c", PROGRAM, *folders], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    codes = done.stdout.split()
    assert set(codes) == {"checkpoint-pickle", "not-safetensors"}
    assert not proof.exists()
    pickle.loads(boom)  # the bait is good
    assert proof.exists()
