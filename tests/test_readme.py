"""The commands of the README and of docs/ are run as they stand, with a tiny model under the name that they use."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e.command import log_rows

ROOT = Path(__file__).parent.parent
MODEL = "meta-llama/Llama-3.2-1B-Instruct"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "accelerate_configs" / "README.md"]
PROSE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
# of verbs that do not train, and of every verb
OTHERS = {
    *("accelerate_config", "stall_seconds", "public", "desktop_gib", "help_all", "gguf", "llama_cpp"),
    *("cards", "host_gib", "link_gb_s", "logging_inf_nan_filter", "seq", "emit", "json", "method", "trainer"),
}
FOREIGN = {
    "enable-lora",
    "max-lora-rank",
    "lora",
    "override-kv",
    "jinja",
    "upgrade",
    "upgrade-package",
}  # of other programs
BLOCKS = re.findall(r"<!-- run(?:: (\w+))? -->\n```(bash|python)\n(.*?)```", PROSE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the README's names exist: a model, a data file, the configurations."""
    place = tmp_path_factory.mktemp("readme")
    shutil.copytree(tiny.build("llama3", place / "tiny"), place / MODEL)
    tiny.write_messages_jsonl(place / "my_chats.jsonl", 8)
    shutil.copytree(ROOT / "accelerate_configs", place / "accelerate_configs")
    return place


def execute(workplace: Path, language: str, block: str) -> subprocess.CompletedProcess[str]:
    """Runs a block as a user would, in the workplace."""
    if language == "python":
        lines = [
            "from datasets import load_dataset",
            "my_dataset = load_dataset('json', data_files='my_chats.jsonl', split='train')",
            block,
        ]
        command = [sys.executable, "-c", "\n".join(lines)]
    else:
        command = ["bash", "-euc", block]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=workplace, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def newcomers(place: Path, page: Path) -> Path:
    """A directory with the rows that a page shows, as a file, and its model."""
    shutil.copytree(tiny.build("qwen3", place / "tiny"), place / "Qwen/Qwen3-0.6B")
    (rows,) = re.findall(r"```json\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len([json.loads(row) for row in rows.splitlines()]) == 2
    (place / "my_chats.jsonl").write_text(rows)
    return place


@pytest.mark.long
def test_getting_started_runs_as_it_stands(tmp_path: Path) -> None:
    page = ROOT / "docs/getting_started.md"
    place = newcomers(tmp_path / "start", page)
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    plan, shown, used = blocks
    assert execute(place, "bash", plan).returncode == 0
    done = execute(place, "bash", shown)
    assert done.returncode == 0 and "Under the third pot." in done.stdout, done.stderr[-3000:]
    done = execute(place, "bash", shown.replace(" --dry_run", ""))
    assert done.returncode == 0 and log_rows(done.stdout), done.stderr[-3000:]
    for command in used.splitlines():
        if "hf-rocm-tune push" not in command:  # needs the Hub
            done = execute(place, "bash", command)
            assert done.returncode == 0, done.stderr[-3000:]


def test_readme_is_short_and_says_first_what_a_newcomer_needs() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 140
    text = " ".join(lines)
    assert text.index("No AMD GPU has run it yet") < text.index("Get the code") < text.index('"messages"')


def test_every_flag_of_ours_is_in_the_table() -> None:
    from hf_rocm_tune.settings.arguments import RanksArguments, TuneArguments

    table = (ROOT / "docs/flags.md").read_text(encoding="utf-8")
    ours = [field.name for owner in (TuneArguments, RanksArguments) for field in dataclasses.fields(owner)]
    named = set(re.findall(r"--([a-z_0-9]+)", table)) | {"verbose"}
    assert len(ours) > 35 and [name for name in ours if name not in named] == []


@pytest.mark.parametrize(
    ("kind", "language", "block"),
    [
        pytest.param(*block, id=f"{n}-{block[0] or 'run'}", marks=[] if block[0] == "fault" else pytest.mark.long)
        for n, block in enumerate(BLOCKS)
    ],
)
def test_block_runs(workplace: Path, kind: str, language: str, block: str) -> None:
    if kind == "start":
        workplace = newcomers(workplace / "start", ROOT / "README.md")
        doctor, block = block.split("\n", 1)
        assert execute(workplace, language, doctor).returncode in (0, 1)  # 1: a finding on this machine
    done = execute(workplace, language, block)
    assert done.returncode == 0, done.stderr[-3000:]
    output = re.search(r'output_dir[ =]"?([\w-]+)', block)
    assert output is not None
    if language == "python":
        assert "100 % of" in done.stdout
        return
    report = json.loads((workplace / output[1] / "transfer_report.json").read_text())
    assert report["ranks"] == (2 if kind == "dual" else 1)
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"]
    assert "integrity: VERIFIED" in done.stdout
    if kind == "start":
        assert log_rows(done.stdout), "the example prints no row of the log"
    if kind == "fault":
        assert report["batches"]["recovered"] == report["fault_injection"]["injected"] > 0
        shutil.rmtree(workplace / output[1])
    elif kind == "":
        shutil.rmtree(workplace / output[1])  # two commands of the README name the same directory


def test_readme_has_every_kind_of_block() -> None:
    assert sorted(kind for kind, _, _ in BLOCKS) == ["", "", "", "dual", "fault", "python", "start"]


def test_every_flag_exists(capsys: pytest.CaptureFixture[str]) -> None:
    from hf_rocm_tune import cli
    from hf_rocm_tune.lifecycle.launcher_flags import CONFIG_FLAG, launcher_flags
    from hf_rocm_tune.settings.arguments import build_parser
    from hf_rocm_tune.settings.flags import ALIASES
    from hf_rocm_tune.settings.verbs import VERBS

    known = {option for verb in VERBS for action in build_parser(verb)._actions for option in action.option_strings}
    known |= {f"--{alias}" for alias in ALIASES}
    known |= {CONFIG_FLAG, *(f"--{name}" for name in launcher_flags())}
    for verb in ("merge", "push", "verify"):
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
        known |= set(re.findall(r"^  (?:-\w, )?(--\w+)", capsys.readouterr().out, flags=re.MULTILINE))
    assert {"--keep_base", "--sign", "--key"} <= known
    named = set(re.findall(r"`--([a-z_0-9]+(?:-[a-z_0-9]+)*)", PROSE))
    assert {flag for flag in named - OTHERS - FOREIGN if f"--{flag}" not in known} == set()


def test_every_file_exists() -> None:
    paths = set(re.findall(r"`((?:hf_rocm_tune|accelerate_configs|tests|scripts)/[\w./]*)`", PROSE))
    assert [path for path in paths if not (ROOT / path).exists()] == []


def names_in(file: Path) -> set[str]:
    """The functions and classes of a file, and the methods of its classes with a dot."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


@pytest.mark.parametrize("story", ["story_of_a_batch", "story_of_a_weight"])
def test_every_function_of_a_story_exists_where_it_is_told(story: str) -> None:
    text = (ROOT / f"docs/{story}.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\| (\d+)\. .+ \| `(hf_rocm_tune/[\w/]+\.py)` \| (`.+`) \|$", text, flags=re.MULTILINE)
    assert [int(number) for number, _, _ in steps] == list(range(1, len(steps) + 1)) and len(steps) > 30
    told = [(file, name) for _, file, names in steps for name in re.findall(r"`([\w.]+)`", names)]
    assert [(file, name) for file, name in told if name not in names_in(ROOT / file)] == []


def test_the_reading_order_has_every_room_and_module() -> None:
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    package = ROOT / "hf_rocm_tune"
    rooms = [f"hf_rocm_tune/{place.name}/" for place in package.iterdir() if (place / "__init__.py").exists()]
    modules = {file.name for file in package.glob("*.py")} - {"__init__.py", "__main__.py", "version.py"}
    assert len(rooms) > 10 and [room for room in rooms if f"`{room}" not in text] == []
    assert [name for name in modules if not re.search(rf"`(hf_rocm_tune/)?{name}`", text)] == []


def test_links_within_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(((?!https?://)[^)#]+)", page.read_text())]
    assert [(page, link) for page, link in links if not (page.parent / link).exists()] == []


def test_the_pages_are_a_site(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e .[dev]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "site").rglob("*.html"))) > len(list((ROOT / "docs").rglob("*.md")))
