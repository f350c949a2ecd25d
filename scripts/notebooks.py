"""Runs the notebooks and writes their outputs into them: ``python scripts/notebooks.py [NAME ...] [--to DIRECTORY]``.

Each runs from top to bottom in a kernel of its own, in an empty directory. What is kept is what a reader should see:
execution counts, times, progress bars and everything that names this machine, its paths or its user are taken out.
Notebook 05 pushes to a Hub; here it is one on loopback (``tests/publish/hub_server.py``), as it says itself.
"""

from __future__ import annotations

import argparse
import getpass
import os
import re
import socket
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
TIMEOUT = 900  # seconds for a cell

# Progress bars, tqdm's complaint that its widgets are not installed, bitsandbytes' that an optional kernel is not.
_NOISE = re.compile(
    r"^.*(\d+%\|.*\|.*\[.*\]|TqdmWarning|IProgress not found|autonotebook_tqdm|notebook_tqdm|kernels-community).*$\n?",
    re.M,
)
_PATH = re.compile(r"(?<![\w.:/])/(?:root|home|tmp|work|opt|mnt|Users|var/folders)/[^\s'\",;:)\]]*")


def names() -> list[str]:
    """All notebooks, by name, in order."""
    return sorted(file.stem for file in FOLDER.glob("*.ipynb"))


def execute(name: str, directory: Path) -> Any:
    """Run a notebook from top to bottom.

    Args:
        name: as `names` has it.
        directory: where its kernel runs, and finds a small model that another notebook has made.

    Returns:
        The notebook with its outputs, normalised.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    client = NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": directory}}
    )
    with _hub() if name.endswith("hub") else nullcontext():
        client.execute()
    return normalised(notebook, name, directory)


def normalised(notebook: Any, name: str, directory: Path | None = None) -> Any:
    """The same notebook without what a run or a machine leaves in it beside the results."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{name[:2]}-{number:02d}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _merged([_output(one, directory) for one in cell.outputs])
    return notebook


def leaks(text: str) -> list[str]:
    """What in a text names a machine: absolute paths, this host, this user, tokens."""
    words = [socket.gethostname(), *([getpass.getuser()] if getpass.getuser() != "root" else [])]
    found = [match.group() for match in _PATH.finditer(text)]
    found += [word for word in words if len(word) > 3 and re.search(rf"\b{re.escape(word)}\b", text)]
    return found + re.findall(r"hf_[A-Za-z0-9]{20,}", text)


def texts(cell: Any) -> list[str]:
    """All text that a code cell has put out."""
    found = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        found += [output.get("text", ""), *(value for kind, value in data.items() if kind.startswith("text/"))]
    return found


def _output(output: Any, directory: Path | None) -> Any:
    output.pop("execution_count", None)
    if output.output_type == "execute_result":
        output = nbformat.v4.new_output("display_data", data=output.data)
    output.metadata = {}
    if output.output_type == "stream":
        output.pop("metadata")
        output.text = _clean(output.text, directory)
    elif "data" in output:
        output.data = {
            kind: _clean(value, directory) if kind.startswith("text/") else value for kind, value in output.data.items()
        }
    return output


def _clean(text: str, directory: Path | None) -> str:
    text = re.sub(r"^.*\r(?!\n)", "", text, flags=re.M)  # what a terminal would have overwritten
    text = _NOISE.sub("", text)
    for place, word in ((directory, "."), (ROOT, "."), (Path.home(), "~")):
        if place is not None:
            text = text.replace(str(place), word)
    text = re.sub(r"(127\.0\.0\.1|localhost):\d+", r"\1:PORT", text)
    return text.replace(socket.gethostname(), "HOST")


def _merged(outputs: list[Any]) -> list[Any]:
    """Pieces of one stream in one piece; nothing empty, and no widgets, which live in their kernel only."""
    kept: list[Any] = []
    for output in outputs:
        if output.get("text") == "" or "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
            continue
        if output.output_type == "stream" and kept and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return [output for output in kept if output.get("text", "x").strip()]


def _hub() -> AbstractContextManager[Any]:
    sys.path.insert(0, str(ROOT))
    from tests.notebooks.hub import hub_in_environment

    return hub_in_environment()


def main() -> int:
    """Runs the notebooks that are named, or all. Returns 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="*", default=names(), help="without .ipynb")
    parser.add_argument("--to", type=Path, default=FOLDER, help="where to write them (default: in place)")
    parser.add_argument("--within", type=Path, help="directory to run in (default: a new one)")
    wanted = parser.parse_args()
    # The kernels inherit these: no bars, no threads that wait for each other on a busy machine, and this checkout.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update({"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path})
    with tempfile.TemporaryDirectory(prefix="notebooks-") as scratch:
        within = wanted.within or Path(scratch)
        for name in wanted.name:
            done = execute(name, within)
            nbformat.write(done, wanted.to / f"{name}.ipynb")
            print(f"{name}: ran from top to bottom", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
