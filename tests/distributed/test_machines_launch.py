"""What the launcher is given for several machines and for restarts, and what is refused before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune import configs
from hf_rocm_tune.distributed import machines_launch
from hf_rocm_tune.distributed.machines_launch import GLOO_VARIABLE, OWN_STORE_VARIABLE, settle
from hf_rocm_tune.distributed.machines_word import MEETING_VARIABLE
from hf_rocm_tune.errors import StallError, TuneError, UsageError

HERE = ["--main_process_ip", "127.0.0.1"]


def parsed(config: str, *flags: str) -> Any:
    """The launcher's own reading of its flags."""
    from accelerate.commands.launch import launch_command_parser

    file = ["--config_file", str(configs.path(config))]
    return launch_command_parser().parse_args([*file, *flags, "-m", "job"])


def settled(config: str, *flags: str, **environ: str) -> tuple[Any, dict[str, str]]:
    arguments = parsed(config, *flags)
    given = {flag.removeprefix("--") for flag in flags if flag.startswith("--")}
    return arguments, settle(arguments, given, environ)


def test_one_machine_without_restarts_is_left_alone() -> None:
    before = vars(parsed("cpu_dual"))
    arguments, variables = settled("cpu_dual")
    assert vars(arguments) == before and variables == {}


def test_restarts_on_one_machine_have_a_fresh_store_for_every_try() -> None:
    arguments, variables = settled("cpu_dual", "--max_restarts", "2")
    assert arguments.standalone is True and variables == {OWN_STORE_VARIABLE: "1"}


def test_restarts_of_one_process_are_the_supervisors_affair() -> None:
    with pytest.raises(UsageError, match="hf-rocm-tune run --"):
        settled("cpu", "--max_restarts", "2")


@pytest.mark.parametrize("rank", [0, 1])
def test_machines_meet_at_machine_0_and_wait_for_each_other(rank: int) -> None:
    arguments, variables = settled("multi_node", *HERE, "--machine_rank", str(rank), "--max_restarts", "3")
    assert (arguments.rdzv_backend, arguments.same_network) == ("c10d", False)
    assert arguments.rdzv_conf == f"is_host={rank == 0}"
    assert arguments.local_addr == "127.0.0.1"
    assert variables == {MEETING_VARIABLE: "127.0.0.1:29500", OWN_STORE_VARIABLE: "1"}


def test_what_the_user_has_set_is_kept() -> None:
    conf = ["--rdzv_conf", "join_timeout=900,is_host=false"]
    arguments, variables = settled("multi_node", *HERE, "--machine_rank", "0", *conf, **{OWN_STORE_VARIABLE: "0"})
    assert arguments.rdzv_conf == conf[1]
    assert OWN_STORE_VARIABLE not in variables
    arguments, _ = settled("multi_node", *HERE, "--machine_rank", "0", "--rdzv_conf", "join_timeout=900")
    assert arguments.rdzv_conf == "join_timeout=900,is_host=True"
    arguments, _ = settled("multi_node", *HERE, "--machine_rank", "0", "--rdzv_backend", "static")
    assert arguments.rdzv_backend == "static"


def test_torch_reads_is_host_as_it_is_written() -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    for wanted in (True, False):
        conf = dict(pair.split("=") for pair in f"is_host={wanted}".split(","))
        rendezvous = RendezvousParameters("c10d", "", "id", 1, 1, None, **conf)
        assert rendezvous.get_as_bool("is_host") is wanted


def test_gloo_is_told_the_interface_that_leads_to_machine_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it listens on the address of the host's name, which may be a loopback one."""
    monkeypatch.setattr(machines_launch, "_own_address", lambda host, port, hosts_it: "192.0.2.7")
    monkeypatch.setattr(machines_launch, "_interface", lambda address: {"192.0.2.7": "enp5s0"}[address])
    flags = ["--main_process_ip", "192.0.2.1", "--machine_rank", "1"]
    arguments, variables = settled("multi_node", *flags)
    assert variables[GLOO_VARIABLE] == "enp5s0" and arguments.local_addr == "192.0.2.7"
    assert GLOO_VARIABLE not in settled("multi_node", *flags, **{GLOO_VARIABLE: "eth9"})[1]


def test_the_interface_of_an_address_is_found() -> None:
    assert machines_launch._interface("127.0.0.1") == "lo"
    assert machines_launch._interface("192.0.2.7") is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--machine_rank", "0"], ["2 machines need --main_process_ip"]),
        ([*HERE], ["--machine_rank", "not given"]),
        ([*HERE, "--machine_rank", "2"], ["--machine_rank", "below 2", "got 2"]),
        ([*HERE, "--machine_rank", "0", "--main_process_port", "0"], ["--main_process_port"]),
        ([*HERE, "--machine_rank", "0", "--num_processes", "3"], ["got 3 for 2 machines"]),
        ([*HERE, "--machine_rank", "0", "--max_restarts", "1", "--rdzv_backend", "static"], ["rdzv_backend c10d"]),
        (["--main_process_ip", "no.such.host.invalid", "--machine_rank", "1"], ["no.such.host.invalid", "address"]),
        (["--main_process_ip", "192.0.2.1", "--machine_rank", "0"], ["192.0.2.1"]),
    ],
)
def test_what_is_missing_or_does_not_fit_is_one_message(flags: list[str], named: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        settled("multi_node", *flags)
    assert all(part in str(caught.value) for part in named), caught.value


def test_a_name_that_only_this_machine_understands_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts gives the machine's own name a loopback address."""
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(UsageError, match=r"tower is 127\.0\.1\.1 on this machine, which the others cannot reach"):
        settled("multi_node", "--main_process_ip", "tower", "--machine_rank", "0")


def test_machines_that_do_not_meet_are_told_in_our_words() -> None:
    from torch.distributed.elastic.rendezvous import api

    arguments, _ = settled("multi_node", *HERE, "--machine_rank", "1")
    messages = {}
    for kind in (api.RendezvousTimeoutError, api.RendezvousConnectionError, api.RendezvousClosedError):
        error = machines_launch.not_met(kind("of theirs"), arguments)
        messages[kind.__name__] = (type(error), str(error))
    assert messages["RendezvousTimeoutError"][0] is messages["RendezvousConnectionError"][0] is StallError
    assert messages["RendezvousClosedError"][0] is TuneError
    assert "join_timeout" in messages["RendezvousTimeoutError"][1]
    assert "127.0.0.1:29500" in messages["RendezvousConnectionError"][1]


def test_accelerate_reads_the_backend_from_the_command_line_only() -> None:
    """Why `settle` reads the file. Where this fails, accelerate has mended it, and that part of `settle` can go."""
    from accelerate.commands.launch import _validate_launch_command

    arguments = parsed("multi_node", *HERE, "--machine_rank", "0", "--mixed_precision", "no")
    assert _validate_launch_command(arguments)[0].rdzv_backend == "static"


def test_a_file_that_is_no_configuration_is_accelerates_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    arguments = parsed("cpu_dual")
    arguments.config_file = str(tmp_path / "list.yaml")
    assert settle(arguments, (), {}) == {}
