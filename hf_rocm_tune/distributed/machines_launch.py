"""Several machines, and restarts of a group of processes, through accelerate's launcher and torch's elastic agent.

Nothing here is an engine: accelerate starts torch's agent, the agents of all machines meet at the address of machine 0,
and `--max_restarts` is the agent's. What this module does is to give the launcher the values with which that works.

The rendezvous is ``c10d``. Tried with torch 2.13 and accelerate 1.15, two agents of one process each:

- ``static`` cannot restart over several machines. No agent waits for the others, so the processes of a new try meet the
  addresses that the last one left in the store; it went on after one try had been wasted, by luck. A machine that comes
  back is never admitted.
- ``c10d``: the agents wait for each other before every try, and a machine that was cut off is admitted when its
  launcher is started again within ``join_timeout`` (600 seconds, ``--rdzv_conf``).
- Both keep one store over all tries unless ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``. Then the same stale addresses are
  met (a restart of two processes on one machine failed whenever rank 0 was two seconds late), and a machine that comes
  back waits for a key that nobody writes (https://github.com/pytorch/pytorch/issues/135712 is the report).

accelerate reads ``rdzv_backend`` and ``same_network`` from the command line only: its flags have defaults, and a value
in the file counts only where a flag has none (``commands/launch.py``). Here the file counts as well.

Which machine gets rank 0 is decided by the order of the machines' addresses as text, not by ``--machine_rank`` (torch,
``dynamic_rendezvous.py``).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from hf_rocm_tune.distributed.machines_word import MEETING_VARIABLE
from hf_rocm_tune.errors import StallError, TuneError, UsageError

OWN_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def settle(arguments: Any, given: Collection[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Give the launcher what several machines, or restarts, need.

    Args:
        arguments: the launcher's flags, as its own parser gives them; changed in place.
        given: names of the flags that are on the command line.
        environ: variables; what the user has set is kept.

    Returns:
        Variables for the processes that are started.

    Raises:
        UsageError: something is missing or does not fit; nothing was started.
    """
    file = _content(arguments.config_file)
    if (arguments.num_machines or file.get("num_machines") or 1) > 1:
        return _several_machines(arguments, given, file, environ)
    if not arguments.max_restarts:
        return {}
    if (arguments.num_processes or file.get("num_processes") or 1) < 2:
        raise UsageError(
            "--max_restarts starts groups of processes again, and this job has one: leave it out and put "
            "`hf-rocm-tune run --` in front of the command"
        )
    arguments.standalone = True  # torch's name for c10d on this machine alone, at a free port
    return _unless_set({OWN_STORE_VARIABLE: "1"}, environ)


def not_met(error: Exception, arguments: Any) -> TuneError:
    """Ours for torch's ``RendezvousError`` and ``DistError``: what they say is about their own objects.

    Returns:
        A StallError where starting again may help, and a TuneError where another machine has ended the job.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

    if (arguments.num_machines or 1) < 2:
        return StallError(f"the processes could not be joined again ({error}): start the same command again")
    where = f"{arguments.main_process_ip}:{arguments.main_process_port}"
    if isinstance(error, RendezvousClosedError):
        return TuneError("another machine has ended the job: its own line is in its terminal")
    if isinstance(error, RendezvousTimeoutError):
        return StallError(
            f"not all {arguments.num_machines} machines came to {where} in time: start the same command on each, with "
            "its own --machine_rank, or wait longer with --rdzv_conf join_timeout=SECONDS"
        )
    return StallError(
        f"machine 0 does not answer at {where}: start the same command there with --machine_rank 0, and let its "
        "firewall pass all TCP from this machine"
    )


def _several_machines(
    arguments: Any, given: Collection[str], file: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, str]:
    for name in ("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, file.get(name))
    _check_numbers(arguments)
    if "rdzv_backend" not in given:
        arguments.rdzv_backend = file.get("rdzv_backend", arguments.rdzv_backend)
    if arguments.rdzv_backend == "static" and arguments.max_restarts:
        raise UsageError(
            "--max_restarts over several machines needs `--rdzv_backend c10d`: with static rendezvous the machines do "
            "not wait for each other, and the processes of a new try meet the addresses of the last one"
        )
    host, port = str(arguments.main_process_ip), int(arguments.main_process_port)
    address = _own_address(host, port, hosts_it=arguments.machine_rank == 0)
    wanted = {MEETING_VARIABLE: f"{host}:{port}"}
    if not ipaddress.ip_address(address).is_loopback and (interface := _interface(address)):
        # gloo asks the host's name for its address, and Debian's answer to that is 127.0.1.1
        wanted[GLOO_VARIABLE] = interface
    if arguments.rdzv_backend == "c10d":
        arguments.same_network = False  # else accelerate gives torch no endpoint
        arguments.local_addr = address  # else the host's name, which the others would have to know
        if "is_host" not in arguments.rdzv_conf:
            conf = [arguments.rdzv_conf] if arguments.rdzv_conf else []
            arguments.rdzv_conf = ",".join([*conf, f"is_host={arguments.machine_rank == 0}"])
        wanted[OWN_STORE_VARIABLE] = "1"
    return _unless_set(wanted, environ)


def _check_numbers(arguments: Any) -> None:
    machines, processes = arguments.num_machines, arguments.num_processes or 0
    if arguments.main_process_ip is None:
        raise UsageError(
            f"{machines} machines need --main_process_ip: the address of machine 0, the same on every machine"
        )
    if arguments.machine_rank is None or not 0 <= arguments.machine_rank < machines:
        got = "it is not given" if arguments.machine_rank is None else f"got {arguments.machine_rank}"
        raise UsageError(
            f"--machine_rank must be 0 on the machine of --main_process_ip and another number below {machines} on each "
            f"other machine; {got}"
        )
    if not arguments.main_process_port:
        raise UsageError("several machines need --main_process_port: a free port of machine 0, the same on every one")
    if processes < machines or processes % machines:
        raise UsageError(
            f"--num_processes counts the processes of all machines, as many on each: got {processes} for {machines} "
            "machines"
        )


def _own_address(host: str, port: int, *, hosts_it: bool) -> str:
    """The address under which this machine reaches ``host``, and is reached by it."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise UsageError(f"--main_process_ip {host} is not known on this machine ({error}): give an address") from error
    meant = str(target[0])
    if meant != host and ipaddress.ip_address(meant).is_loopback:
        raise UsageError(
            f"--main_process_ip {host} is {meant} on this machine, which the others cannot reach: give the address in "
            "the network that they share"
        )
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: asks the kernel for the route
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(f"this machine has no route to --main_process_ip {host}: {error.strerror}") from error
    if hosts_it and own != meant:
        raise UsageError(
            f"--main_process_ip {host} is no address of this machine, which is machine 0; it has {own} in that network"
        )
    return own


def _interface(address: str) -> str | None:
    import psutil  # a dependency of accelerate

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    return None


def _unless_set(wanted: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if name == MEETING_VARIABLE or name not in environ}


def _content(file: str | None) -> dict[str, Any]:
    """What an accelerate configuration says, the user's default one where none is named.

    Empty where there is none, or it cannot be read, which accelerate complains of itself.
    """
    from accelerate.commands.config.config_args import default_config_file

    try:
        found = yaml.safe_load(Path(file or default_config_file).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        found = None
    return found if isinstance(found, dict) else {}
