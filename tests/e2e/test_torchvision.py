"""A torchvision that is built for another torch: named with the command, hidden from runs of text.

A package that fails to import as the real one does, with the real one's message: the index has none for a CPU torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import pictures
from tests.e2e.conftest import flags

ROOT = Path(__file__).resolve().parent.parent.parent
RAISES = "raise RuntimeError('operator torchvision::nms does not exist')\n"
TELLS = "open(__import__('os').environ['IMPORTED'], 'a').write('imported')\n"


@pytest.fixture
def installed(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Variables of a process that has a torchvision with this source."""

    def install(source: str) -> dict[str, str]:
        site = tmp_path / "site"
        for folder, file, text in (
            ("torchvision", "__init__.py", source),
            ("torchvision-0.28.0.dist-info", "METADATA", "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"),
        ):
            (site / folder).mkdir(parents=True, exist_ok=True)
            (site / folder / file).write_text(text)
        return {**os.environ, "PYTHONPATH": f"{site}:{ROOT}", "IMPORTED": str(tmp_path / "imported")}

    return install


def run(env: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hf_rocm_tune", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)


def test_a_run_of_text_neither_imports_nor_minds_it(
    installed: Callable[[str], dict[str, str]], model_of: Callable[[str], Path], base_flags: list[str], tmp_path: Path
) -> None:
    argv = [*base_flags, *flags(model_name_or_path=model_of("llama3"), dry_run="text")]
    done = run(installed(TELLS + RAISES), "sft", *argv)
    assert done.returncode == 0, done.stderr
    assert "torchvision" not in done.stdout + done.stderr
    assert not (tmp_path / "imported").exists()


def test_a_run_with_pictures_names_the_command_and_trains_where_its_processor_does_not_need_it(
    installed: Callable[[str], dict[str, str]], base_flags: list[str], tmp_path: Path
) -> None:
    model = pictures.build_llava(tmp_path / "llava")
    rows = pictures.write_rows(tmp_path / "rows")
    settings = flags(model_name_or_path=model, dataset_name=rows, output_dir=tmp_path / "out")
    done = run(installed(RAISES), "sft", *base_flags, *settings)
    assert done.returncode == 0, done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if "torchvision" in line]
    assert len(said) == 1 and "torchvision 0.28.0 does not fit torch" in said[0]
    assert "operator torchvision::nms does not exist" in said[0] and "--no-deps torchvision==" in said[0]


def test_the_doctor_names_the_command(installed: Callable[[str], dict[str, str]]) -> None:
    done = run(installed(RAISES), "doctor")
    assert "torchvision 0.28.0 cannot be imported beside torch" in " ".join(done.stdout.split()), done.stdout
    assert "--no-deps" in done.stdout
