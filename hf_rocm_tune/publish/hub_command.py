"""``hf-rocm-tune push DIR REPO``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, get_args

from hf_rocm_tune.errors import Interrupted, UsageError
from hf_rocm_tune.publish.hub import Checkpoints, PushSettings, push, summary
from hf_rocm_tune.publish.hub_errors import HubError
from hf_rocm_tune.publish.hub_sync import Verify

PROGRAM = "hf-rocm-tune push"
_AGAIN = "The same command goes on where it stopped"


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: the arguments behind ``push``.

    Returns:
        0; whatever goes wrong is raised.
    """
    wanted = vars(_parser().parse_args(list(argv)))
    directory, repo_id = wanted.pop("directory"), wanted.pop("repo_id")
    try:
        settings = PushSettings(**{**wanted, "tags": tuple(wanted["tags"])})
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    try:
        done = push(directory, repo_id, settings=settings, say=_say)
    except HubError as error:
        raise HubError(f"{error}. {_AGAIN}") from error
    except KeyboardInterrupt as stop:
        raise Interrupted(f"the push was stopped. {_AGAIN}") from stop
    print(summary(done))
    return 0


def _say(line: str) -> None:
    print(f"hf-rocm-tune: {line}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Upload a finished run to the Hugging Face Hub, without this machine's paths, and verify that the "
        "Hub serves what was trained. The token is the one of `hf auth login` or HF_TOKEN.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="a finished run, a checkpoint or a merged model")
    parser.add_argument("repo_id", metavar="REPO", help="USER/NAME, or NAME for one of your own")
    visibility = parser.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", default=None, help="refuse a repository that is public")
    visibility.add_argument(
        "--public", action="store_false", dest="private", default=None, help="make a new repository public, not private"
    )
    parser.add_argument("--revision", default="main", metavar="BRANCH", help="made where it is not there")
    parser.add_argument(
        "--tag", dest="tags", action="append", default=[], metavar="TAG", help="tag the commit; may be repeated"
    )
    parser.add_argument("--message", default=PushSettings.message, help="first line of the commit")
    parser.add_argument(
        "--base_model_id", metavar="ORG/NAME", help="the base model on the Hub, where it was loaded from a directory"
    )
    parser.add_argument(
        "--checkpoints",
        choices=get_args(Checkpoints),
        default="none",
        help="push checkpoints too: the newest as last-checkpoint, or all (default: none)",
    )
    parser.add_argument(
        "--verify",
        choices=get_args(Verify),
        default="download",
        help="afterwards compare every byte, downloaded, or only the hashes that the Hub states (default: download)",
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse with its errors as ``UsageError``."""

    def error(self, message: str) -> NoReturn:
        """Say it in one line; the usage is one ``--help`` away."""
        raise UsageError(f"{message}; see `{self.prog} --help`")
