"""The notebooks: each runs from top to bottom on the CPU, and what is committed is readable, truthful and anonymous.

Run by the script that writes their outputs, in an empty directory, with a small model that the first of them makes. Not
covered: the real models, and two cards.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

NAMES = [
    "01_quickstart_lora",
    "02_qlora_with_the_planner",
    "03_two_cards_notebook_launcher",
    "04_transfers_and_drill",
    "05_push_to_the_hub",
    "06_your_own_data",
    "07_preferences_with_dpo",
    "08_your_own_loop",
    "09_pictures",
]
TIMEOUT = 600.0


@pytest.fixture(scope="session")
def script(checkout: Path) -> ModuleType:
    """The script that runs the notebooks, as a module."""
    spec = importlib.util.spec_from_file_location("notebooks_script", checkout / "scripts/notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def within(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all of them, so that the small model is made once."""
    return tmp_path_factory.mktemp("notebooks")


def committed(checkout: Path, name: str) -> Any:
    """A notebook as it stands in the repository."""
    return nbformat.read(checkout / "notebooks" / f"{name}.ipynb", as_version=4)


def pictures(notebook: Any) -> list[tuple[int, int]]:
    """Width and height of every PNG."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                content = base64.b64decode(png)
                assert content[:8] == b"\x89PNG\r\n\x1a\n"
                found.append(struct.unpack(">II", content[16:24]))
    return found


def test_all_are_there(script: ModuleType) -> None:
    assert script.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.long
def test_runs_from_top_to_bottom(name: str, checkout: Path, within: Path, tmp_path: Path, script: ModuleType) -> None:
    command = [sys.executable, "scripts/notebooks.py", name, "--to", str(tmp_path), "--within", str(within)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    ran, kept = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4), committed(checkout, name)
    assert [cell.source for cell in ran.cells] == [cell.source for cell in kept.cells]
    assert len(pictures(ran)) == len(pictures(kept))
    for cell in ran.cells:
        assert not script.leaks("\n".join(script.texts(cell)))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_is_valid_normalised_and_small(name: str, checkout: Path, script: ModuleType) -> None:
    file = checkout / "notebooks" / f"{name}.ipynb"
    notebook = committed(checkout, name)
    nbformat.validate(notebook)
    assert nbformat.writes(script.normalised(notebook, name)) + "\n" == file.read_text().rstrip("\n") + "\n"
    assert file.stat().st_size < 400_000
    for cell in notebook.cells:
        if cell.cell_type == "code" and "!{" not in cell.source:
            ast.parse(cell.source)


def test_what_they_call_is_what_the_package_has(checkout: Path, tmp_path: Path) -> None:
    """By mypy, in seconds: the notebooks themselves run in the long suite only."""
    for name in NAMES:
        code = "\n".join(cell.source for cell in committed(checkout, name).cells if cell.cell_type == "code")
        (tmp_path / f"cells_{name}.py").write_text(re.sub(r"(?m)^( *)([!%].*)$", r"\1pass  # \2", code) + "\n")
    files = sorted(map(str, tmp_path.iterdir()))
    command = [sys.executable, "-m", "mypy", *files]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    wrong = ("[call-arg]", "[attr-defined]", "[import-not-found]", "[arg-type]", "[syntax]")
    assert f"checked {len(NAMES)} source files" in done.stdout, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith(wrong)] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_shows_results_and_no_failure(name: str, checkout: Path) -> None:
    notebook = committed(checkout, name)
    assert notebook.cells[0].cell_type == "markdown"
    assert "on a\nCPU" in notebook.cells[0].source or "on a CPU" in notebook.cells[0].source.replace("\n", " ")
    sizes = pictures(notebook)
    assert sizes and all(300 <= width <= 1200 and 150 <= height <= 800 for width, height in sizes)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    errors = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert all(line.startswith("hf-rocm-tune: ") for line in errors.splitlines() if line), errors
    # A reader who only scrolls: no two results without a word between them, three in a row at most.
    kinds = "".join("m" if cell.cell_type == "markdown" else "c" for cell in notebook.cells)
    assert "cccc" not in kinds


@pytest.mark.parametrize("name", [name for name in NAMES if name != "08_your_own_loop"])  # it makes its model itself
def test_the_model_is_one_setting_in_the_first_cell_and_no_output_names_the_machine(
    name: str, checkout: Path, script: ModuleType
) -> None:
    notebook = committed(checkout, name)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert len(re.findall(r"^MODEL = \"[\w./-]+\"", code[0], re.MULTILINE)) == 1
    assert not any(re.search(r"^MODEL\s*=", source, re.MULTILINE) for source in code[1:])
    imports = [line for line in code[0].splitlines() if line.startswith(("import ", "from "))]
    assert next(line for line in imports if line != "import os").startswith("import hf_rocm_tune")
    assert not [leak for cell in notebook.cells for text in script.texts(cell) for leak in script.leaks(text)]


@pytest.mark.parametrize(
    "text",
    [
        "saved in /root/x/y",
        "File '/home/someone/a.py'",
        "/tmp/notebooks-abc/out",
        "C=/work/a",
        "token hf_ABCDEFGHIJKLMNOPQRSTUVWX",
    ],
)
def test_leaks_are_seen(text: str, script: ModuleType) -> None:
    assert script.leaks(text)
    assert not script.leaks("notebook-runs/out/adapter.json, ./.venv/lib, 3/4, https://example.org/tmp/x")


def test_normalising_takes_out_paths_bars_counts_and_ports(script: ModuleType, tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell("x", execution_count=7, metadata={"execution": {"iopub.status.busy": "now"}})
    cell.outputs = [
        nbformat.v4.new_output("stream", name="stdout", text=f"in {tmp_path}/out"),
        nbformat.v4.new_output("stream", name="stdout", text="\n"),
        nbformat.v4.new_output(
            "stream", name="stdout", text=" 50%|###  | 1/2 [00:01<00:01]\rhttp://127.0.0.1:4567/x\n"
        ),
        nbformat.v4.new_output("stream", name="stderr", text="TqdmWarning: IProgress not found.\n"),
        nbformat.v4.new_output("execute_result", data={"text/plain": f"'{tmp_path}'"}, execution_count=7),
    ]
    done = script.normalised(nbformat.v4.new_notebook(cells=[cell]), "01_x", tmp_path)
    assert [output.output_type for output in done.cells[0].outputs] == ["stream", "display_data"]
    assert done.cells[0].outputs[0].text == "in ./out\nhttp://127.0.0.1:PORT/x\n"
    assert done.cells[0].outputs[1].data == {"text/plain": "'.'"}
    assert (done.cells[0].execution_count, done.cells[0].metadata, done.cells[0].id) == (None, {}, "01-00")
    nbformat.validate(done)
