"""``hf-rocm-tune``: quick, no torch before it is needed, one line and code 2 for wrong input."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hf_rocm_tune import cli, configs
from hf_rocm_tune.machine import variables
from hf_rocm_tune.version import __version__


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = cli.main(argv)
    except SystemExit as caught:  # argparse's --help
        code = int(caught.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_verbs_are_the_public_commands() -> None:
    training, machine = (
        ["sft", "train", "dpo", "kto", "reward", "grpo", "orpo", "script", "run"],
        ["doctor", "plan", "configs", "recipes", "env", "demo"],
    )
    result = ["report", "push", "verify", "merge", "generate", "chat"]
    assert list(cli.VERBS) == [*training, *machine, *result, "version"]
    assert all(command.__doc__ and "\n" not in command.__doc__ for command in cli.VERBS.values())


def test_help_and_version_import_no_torch() -> None:
    code = (
        "import sys; from hf_rocm_tune import cli\n"
        "assert cli.main([]) == cli.main(['--help']) == cli.main(['--version']) == 0\n"
        "assert cli.main(['configs', 'ls']) == cli.main(['recipes', 'ls']) == 0\n"
        "assert cli.main(['env']) == cli.main(['stf']) - 2 == 0\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'trl'} & set(sys.modules); assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "sft" in done.stdout


LONG = "x" * 300  # more than a file system takes


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["stf"], ["'stf'", "sft"]),
        (["fine-tune"], ["'fine-tune'", "did you mean sft?"]),
        (["recipes", "list"], ["'list'", "did you mean ls?"]),
        (["recipes", "valdate", "x"], ["did you mean validate?"]),
        (["doctor", "--olny", "link"], ["unrecognized arguments: --olny", "did you mean --only?"]),
        (["plan", "--modl", "x"], ["did you mean --model?"]),
        (["plan", "--model", "x", "--method", "qlorra"], ["did you mean qlora?"]),
        (["configs", "path", "cpu_dul"], ["cpu_dul", "cpu_dual"]),
        (["configs", "cp", "cpu"], ["dest"]),
        (["sft", "--accelerate_config"], ["--accelerate_config"]),
        (["sft", "--accelerate_config", "nowhere", "--model", ".", "--dataset", "."], ["nowhere"]),
        (["sft", "--accelerate_config", "cpu", "--config", "missing.yaml"], ["missing.yaml"]),
        (["configs", "cp", "cpu", LONG], ["cannot write", "too long"]),
        (["doctor", "--drill", "--json", LONG], ["--json"]),
        (["doctor", "--drill", "--seed", "9" * 400], ["--seed", "below 2**32"]),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    argv: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("hf-rocm-tune: error: ")
    assert all(name in err for name in named), err


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "help") == run(capsys, "--help")
    assert run(capsys, "help", "sft") == run(capsys, "sft", "--help")
    assert run(capsys, "help", "plan") == run(capsys, "plan", "--help")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "version") == run(capsys, "--version") == (0, f"hf-rocm-tune {__version__}\n", "")


def test_configs_are_listed_found_and_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "configs", "ls")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == configs.CONFIGS.names()
    _, out, _ = run(capsys, "configs", "path", "cpu")
    source = Path(out.strip())
    target = tmp_path / "mine.yaml"
    assert run(capsys, "configs", "cp", "cpu", str(target)) == (0, f"{target}\n", "")
    assert target.read_bytes() == source.read_bytes()
    target.write_text("edited")
    assert run(capsys, "configs", "cp", "cpu", str(target))[0] == 2
    assert target.read_text() == "edited"
    assert run(capsys, "configs", "cp", "cpu", str(target), "--force")[0] == 0
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.parametrize(("action", "strict"), [("set", 0), ("info", 0), ("warn", 1)])
def test_env_shows_the_decisions_and_strict_judges_them(
    action: str, strict: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = variables.Decision(variable="A_VARIABLE", action=action, value="a b", reason="because", source="a page")
    monkeypatch.setattr(variables, "DECISIONS", [made])
    code, out, _ = run(capsys, "env")
    assert (code, "A_VARIABLE" in out, "because" in out) == (0, True, True)
    assert run(capsys, "env", "--strict")[0] == strict


HEAVY = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "bitsandbytes")
#: Runs a command, and complains of what it has imported.
LIGHT = f"""
import runpy, sys
module, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
finally:
    print(*set({HEAVY!r}) & set(sys.modules), end="", file=sys.stderr)
"""
STARTS = (("hf_rocm_tune", "sft"), ("hf_rocm_tune", "train"), ("hf_rocm_tune.sft",), ("hf_rocm_tune.orpo",))


def light(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LIGHT, *argv], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("start", STARTS[1:3], ids=" ".join)
def test_training_help_is_one_screen_that_imports_nothing_large(start: tuple[str, ...]) -> None:
    done = light(*start, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 80
    for part in ("--model NAME", "--verify full|sample|off", "--accelerate_config", "--help_all"):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("verb", "own"),
    [("dpo", "--loss_type"), ("kto", "--desirable_weight"), ("reward", "--center_rewards"), ("grpo", "--reward_funcs")],
)
def test_the_short_help_has_a_method_s_own_flags_and_none_that_it_refuses(verb: str, own: str) -> None:
    shown = light("hf_rocm_tune", verb, "--help").stdout
    assert own in shown and max(map(len, shown.splitlines())) <= 80
    assert not any(f"  --{flag} " in shown for flag in ("auto_fit", "split_layers", "packing"))


def test_wrong_paths_and_numbers_are_told_before_anything_large_is_imported(tmp_path: Path) -> None:
    right, recipe = tmp_path / "right.jsonl", tmp_path / "mine.yaml"
    right.write_text('{"text": "a"}\n')
    recipe.write_text("lora_r: 0\n")
    for argv, named in (
        (["--model", str(tmp_path / "no")], "does not exist"),
        (["--model", "x", "--dataset", str(tmp_path / "no.csv")], "no such file or folder"),
        (["--model", "x", "--dataset", str(right), "--lr=-1"], "--learning_rate must be 0 or more"),
        (["--model", "x", "--dataset", str(right), "--config", str(recipe)], "--lora_r must be 1 or more, got 0"),
        (["x", str(right)], "unexpected argument 'x': flags begin with --, such as --model NAME"),
        (["--config", str(tmp_path)], f"recipe {tmp_path} cannot be read: Is a directory"),
        (["--dataset", str(right)], "no model: give --model"),
        (["--model", "--dataset", str(right)], "--model_name_or_path needs a value after it"),
        (["--model", "x", "--lora_r", "ten"], "--lora_r must be 1 or more, got ten"),
        (["--model", "nobody/nothing", "--dataset", str(right)], "the Hub cannot be reached"),
    ):
        done = light(*STARTS[1], *argv)
        assert done.returncode == 2 and named in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("start", STARTS[2:], ids=" ".join)
def test_mistyped_names_are_told_before_anything_large_is_imported(start: tuple[str, ...], tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning_rat: 1\n")
    for argv, named in (
        (["--model", "x", "--learning_rat", "3"], "unknown flag --learning_rat; did you mean --learning_rate?"),
        (["--qlora"], "unknown flag --qlora; did you mean --load_in_4bit?"),
        (["--bathc-size=3"], "unknown flag --bathc-size; did you mean --batch_size?"),
        (["--config", str(recipe)], "unknown key learning_rat; did you mean learning_rate?"),
    ):
        done = light(*start, *argv)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("hf-rocm-tune: error: ")
        assert named in done.stderr


def test_a_recipe_of_a_model_on_the_hub_is_written_without_a_network() -> None:
    command = [sys.executable, "-m", "hf_rocm_tune.sft", "--model", "nobody/nothing", "--dataset", "nobody/rows"]
    done = subprocess.run(
        [*command, "--output_dir", "out", "--print_config"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["model_name_or_path"] == "nobody/nothing"


#: A help text that begins so needs the flag's name as its subject.
FRAGMENT = re.compile(r"(of|from|the same|without|for|as|with|at most|may|default:|so|before|\(|\d+:)\b|\(|\d+:")


@pytest.mark.parametrize(
    "verb", ["run", "doctor", "plan", "env", "demo", "report", "push", "merge", "generate", "chat", "recipes", "verify"]
)
def test_a_flag_s_help_can_be_read_without_its_name(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    code, out, err = run(capsys, verb, *(["cp"] if verb == "recipes" else []), "--help")
    assert (code, err) == (0, "")
    texts = re.findall(r"^  (-\S.*?)(?:  +|\n +)(\S.*)$", out, re.MULTILINE)
    assert len(texts) > 1 and ("-h, --help", "show this help message and exit") in texts
    assert [(flag, text) for flag, text in texts if FRAGMENT.match(text)] == []


def test_help_all_has_every_flag_with_our_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "sft", "--help_all")
    assert code == 0
    assert out.index("--verify") < out.index("--learning_rate") < out.index("--accelerate_config")
    words = " ".join(out.split())
    for flag, ours in (("use-peft", "True"), ("learning-rate", "0.0002"), ("lora-target-modules", "['all-linear']")):
        assert re.search(rf"--{flag} (?:(?!--).)*\(default: {re.escape(ours)}\)", words), flag


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m hf_rocm_tune sft --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("output", "code"), [(">&-", 0), ("> /dev/full", 2)])
def test_output_that_is_closed_or_full(output: str, code: int) -> None:
    command = f"{sys.executable} -m hf_rocm_tune version {output}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code and done.stderr.count("\n") == (code == 2), done.stderr
