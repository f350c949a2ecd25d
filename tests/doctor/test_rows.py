"""The rows of knowledge: every one has a source and a cure, every one is used, and every number is where it belongs."""

from __future__ import annotations

import ast
import re
import string
import tomllib
from pathlib import Path

import pytest

from hf_rocm_tune.doctor.findings import DATA_FILES, KNOWLEDGE, all_rows, from_row, knowledge_data, skipped, unknown
from hf_rocm_tune.machine.survey import CARDS
from hf_rocm_tune.machine.variables import POLICY, link_of
from hf_rocm_tune.transfer import AcceleratorBackend, TransferSettings

SOURCES = [ast.parse(file.read_text("utf-8")) for file in sorted(KNOWLEDGE.parent.rglob("*.py"))]


def strings() -> set[str]:
    """Every string in the code of the doctor."""
    return {node.value for tree in SOURCES for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_every_row_keeps_the_rules() -> None:
    assert len(all_rows()) > 80
    for row in all_rows().values():
        assert row.status in ("ok", "info", "warn", "fail"), row.name
        assert row.confidence in ("documented", "reproduced", "reported", "general"), row.name
        assert row.title.strip() and row.says.strip(), row.name
        assert row.cure.strip() or row.status == "ok", row.name
        assert row.sources and all(source.strip() for source in row.sources), row.name
        assert type(row.needs_cards) is int and row.needs_cards in (0, 2), row.name
        assert type(row.tested_here) is bool, row.name


def patterns() -> list[re.Pattern[str]]:
    """Every f-string that may make a row's name: ``f"round_trip_{kind}"``."""
    made = [
        "".join(re.escape(part.value) if isinstance(part, ast.Constant) else "[a-z0-9_]+" for part in node.values)
        for tree in SOURCES
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr) and len(node.values) > 1
    ]
    return [re.compile(text) for text in made if re.match("[a-z]{4}", text)]


def test_every_row_is_used() -> None:
    used = strings() | {entry["row"] for entry in knowledge_data("kernels.toml").values()}
    made = patterns()
    assert not [name for name in all_rows() if name not in used and not any(one.fullmatch(name) for one in made)]


def test_every_row_that_is_named_exists_and_gets_its_values() -> None:
    calls = 0
    for tree in SOURCES:
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "from_row" and len(node.args) == 1):
                continue
            name = node.args[0]
            if isinstance(name, ast.Constant):
                calls += 1
                given = {keyword.arg for keyword in node.keywords} - {"check", "subject", "evidence"}
                row = all_rows()[name.value]
                given |= row.placeholders & {"address", "device"}  # the subject, unless given
                if None in given:  # ``**values``: what is in them is seen when it runs
                    assert given - {None} <= row.placeholders, row.name
                else:
                    assert given == row.placeholders, row.name
    assert calls > 40


def test_the_words_hold_nothing_that_a_table_cannot_show() -> None:
    for row in all_rows().values():
        for text in (row.title, row.says, row.cure, *row.sources):
            assert text.isprintable(), row.name
            assert not re.search(r"TODO|XXX|FIXME", text), row.name


def test_what_contradicts_itself_is_never_an_order() -> None:
    for row in all_rows().values():
        if "iommu" in f"{row.says} {row.cure}".lower():
            assert row.needs_cards == 2, row.name
            assert not re.search(r"\b(must|have to|always|required)\b", f"{row.says} {row.cure}".lower()), row.name


def test_a_finding_takes_exactly_the_values_of_its_row() -> None:
    values = {"counts": "3 fatal"}
    finding = from_row("aer_errors", subject="0000:03:00.0", evidence=["x"], **values)
    assert (finding.status, finding.confidence, finding.sources[0]) == (
        "warn",
        "general",
        "kernel documentation: PCI Express AER",
    )
    assert finding.text.startswith("0000:03:00.0 counted 3 fatal errors")
    for wrong in ({**values, "more": 1}, {"address": "x"}):
        with pytest.raises(ValueError, match="aer_errors"):
            from_row("aer_errors", **wrong)
    with pytest.raises(KeyError):
        from_row("no_such_row")


def test_values_are_never_taken_for_words_of_a_row() -> None:
    finding = from_row("torch_missing", reason="{count} {0} {")
    assert finding.text == "{count} {0} {"


GENERAL = "general knowledge, lower confidence"
# Names of a page that is no part of this repository.
NO_SOURCE = re.compile(r"FACTS\.md|\bFACTS:|\bFACTS (section|[0-9])|facts page")


def test_a_source_is_one_that_a_reader_can_look_up() -> None:
    named = [source for row in all_rows().values() for source in row.sources]
    named += [row.source for row in POLICY] + [card.source for card in CARDS]
    named += [entry["source"] for entry in knowledge_data("thresholds.toml").values()]
    assert not [source for source in named if "FACTS" in source]
    for row in all_rows().values():
        if set(row.sources) == {GENERAL}:
            assert row.confidence == "general", row.name
        for source in row.sources:
            assert "general knowledge" not in source or source == GENERAL, row.name
            ours = source.partition("this project: ")[2]
            assert not ours or (KNOWLEDGE.parents[2] / ours).is_file(), row.name


def test_nothing_in_the_package_points_at_a_page_that_is_not_there() -> None:
    package = KNOWLEDGE.parents[1]
    files = [file for suffix in ("py", "toml", "md", "yaml") for file in package.rglob(f"*.{suffix}")]
    assert len(files) > 100
    assert not [str(file) for file in files if NO_SOURCE.search(file.read_text("utf-8"))]


def test_what_nobody_has_tried_here_says_so() -> None:
    assert from_row("windows").text.endswith("(not tested by this project)")
    assert "not tested" not in from_row("no_gpu").text


def test_not_knowing_and_not_trying_have_a_reason_and_no_source() -> None:
    assert unknown("a\n b").text == "a b"
    assert (skipped("why").status, skipped("why").sources) == ("skipped", ())


def test_the_data_files_point_at_rows_and_name_their_ground() -> None:
    for name, entry in knowledge_data("kernels.toml").items():
        assert entry["row"] in all_rows(), name
        assert "exact" in entry or "from" in entry or "below" in entry, name
        assert entry.keys() <= {"row", "exact", "of", "from", "below", "archs"}, name
        assert "exact" in entry or "of" not in entry, name
    for name, entry in knowledge_data("thresholds.toml").items():
        assert entry["source"].strip(), name
    assert {file.name for file in KNOWLEDGE.glob("*.toml")} >= set(DATA_FILES)


def test_the_tested_versions_are_the_lower_bounds_of_the_package(checkout: Path) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]
    bounds = dict(line.split(">=") for line in project["dependencies"])
    tested = knowledge_data("versions.toml")["tested"]
    assert {name: bounds.get(name) for name in tested} == tested
    assert {"torch", "transformers", "accelerate", "peft", "trl", "datasets", "bitsandbytes"} <= tested.keys()


def test_the_ring_is_as_large_as_the_engine_makes_it() -> None:
    ring = TransferSettings().slots * AcceleratorBackend.default_slot_bytes
    assert knowledge_data("thresholds.toml")["host_memory"]["ring_mib"] == ring >> 20


def test_addresses_are_whole_and_each_is_that_of_a_source() -> None:
    sources = {source for row in all_rows().values() for source in row.sources}
    links = {source: link_of(source) for source in sources}
    assert sum(bool(link) for link in links.values()) > len(links) / 2
    for source, link in links.items():
        assert link == "" or re.fullmatch(r"https://[a-z0-9.]+/\S*", link), source
    sources |= {name.strip() for row in POLICY for name in row.source.split(";")}
    known = tomllib.loads((KNOWLEDGE.parents[1] / "machine/addresses.toml").read_text("utf-8"))
    assert not [name for name in known["pages"] if name not in sources]
    named = {source.partition("#")[0] for source in sources if "#" in source}
    assert not [name for name in known["repositories"] if name not in named]


def test_what_rows_tell_the_policy_is_what_the_policy_waits_for() -> None:
    told = {name for row in all_rows().values() for name in row.environ}
    waited = {row.finding for row in POLICY if row.finding}
    assert waited == told


def test_placeholders_are_plain_names() -> None:
    for row in all_rows().values():
        for _, name, _, _ in string.Formatter().parse(f"{row.title} {row.says} {row.cure}"):
            assert name is None or name.isidentifier(), row.name
