"""What the Hub or the way to it answers, as one line with the cure; and whether asking again may help.

`huggingface_hub` raises its own errors, those of its HTTP client, those of its Xet client (plain ``RuntimeError``), and
wraps uploads of single files in a ``RuntimeError``; the first of its own or of HTTP's in the chain of causes counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx2
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from hf_rocm_tune.errors import TuneError, UsageError
from hf_rocm_tune.publish.privacy import Private, scrub_text

TOKENS_PAGE = "https://huggingface.co/settings/tokens"
_CONFLICTS = (409, 412)
_BUSY = (408, 425, 429)
_CLIENTS = frozenset({"huggingface_hub", "httpx2", "httpcore2", "hf_xet", "json"})
_STATUS_OF_XET = re.compile(r"HTTP status (?:client|server) error \((\d{3})\b")
_CALLERS_OF_XET = frozenset({"huggingface_hub._commit_api", "huggingface_hub._upload_pipeline", "hf_xet"})


class HubError(TuneError):
    """The Hub did not take an upload, although it may at another time. What is on this disk is as it was."""


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: no connection, a timeout, 408, 425, 429, 5xx, a broken answer."""
    status = status_of(error)
    if status is not None:
        return status in _BUSY or status >= 500
    causes = tuple(_causes(error))
    if any(isinstance(one, OfflineModeIsEnabled | LocalTokenNotFoundError) for one in causes):
        return False
    if any(isinstance(one, httpx2.TransportError | json.JSONDecodeError) for one in causes):
        return True  # a proxy's or a load balancer's own page is no JSON
    return _is_of_xet(error)


def is_conflict(error: BaseException) -> bool:
    """Whether another commit came in between (409, 412)."""
    return status_of(error) in _CONFLICTS


def is_of_the_hub(error: BaseException) -> bool:
    """Whether an error was raised by the Hub's client or what it is made of; all others are bugs of ours."""
    return isinstance(error, HfHubHTTPError | httpx2.HTTPError) or _raised_in(error).partition(".")[0] in _CLIENTS


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error carries; None for none."""
    answer = _answer(error)
    if answer is not None:
        return answer.response.status_code
    found = _STATUS_OF_XET.search(str(error)) if _is_of_xet(error) else None
    return int(found[1]) if found else None


def asked_wait(error: BaseException) -> float | None:
    """Seconds that the answer asks to wait (Retry-After as a number); None where it says nothing."""
    answer = _answer(error)
    said = answer.response.headers.get("Retry-After", "") if answer is not None else ""
    return float(said) if said.strip().isdigit() else None


def explain(error: BaseException, *, repo_id: str, private: Private) -> TuneError:
    """One line that says what is wrong and what to do, without secrets.

    Returns:
        A ``UsageError`` for what the user can change, else a `HubError`; ``error`` is its cause.
    """
    known = _known(error, repo_id)
    said = scrub_text(str(known), private, names=False)
    mapped = type(known)(said)
    mapped.__cause__ = error
    return mapped


def _known(error: BaseException, repo_id: str) -> TuneError:
    answer = _answer(error)
    if "nvalid metadata in README.md" in str(error):  # found before the upload, or by the commit itself
        said = str(error).partition("README.md")[2].strip(" .:\n")
        return UsageError(f"the Hub refuses the model card: {said}; mend the metadata of README.md")
    status = status_of(error)
    if status == 404 and answer is None:
        return UsageError("this Hub has no Xet storage (404): set HF_HUB_DISABLE_XET=1, and it is pushed by Git LFS")
    if isinstance(answer, RevisionNotFoundError):
        return UsageError(f"{repo_id} has no such revision (404: {answer.server_message}): name a branch")
    if status is not None:
        return _of_status(status, answer.server_message if answer else "", repo_id)
    causes = tuple(_causes(error))
    for one in causes:
        if isinstance(one, LocalTokenNotFoundError):
            return UsageError(
                f"no token for the Hub: run `hf auth login`, or set HF_TOKEN to one with write access ({TOKENS_PAGE})"
            )
        if isinstance(one, OfflineModeIsEnabled):
            return UsageError("HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set, so nothing can be pushed: unset it")
        if isinstance(one, HFValidationError):
            return UsageError(f"{repo_id!r} is no name for a repository ({one}): write USER/NAME")
    if "LFS batch API" in str(error):
        return UsageError(f"the Hub refuses a file: {_last_lines(str(error))}; leave it out, or make it smaller")
    last = causes[-1]
    what = f"{type(last).__name__}: {last}".rstrip(": ")
    if is_transient(error):
        return HubError(f"the Hub cannot be reached ({what}): check the network")
    return HubError(f"the Hub's client failed ({what}): try again, and if it stays, with another huggingface_hub")


def _of_status(status: int, message: str | None, repo_id: str) -> TuneError:
    """The line for an answer of the Hub or of its storage."""
    said = f": {message}" if message else ""
    if status == 401:
        return UsageError(
            f"the Hub does not accept the token (401{said}): it is wrong, expired or revoked, or none was sent; make "
            f"one with write access at {TOKENS_PAGE}, then `hf auth login` or set HF_TOKEN"
        )
    if status == 403:
        return UsageError(
            f"the token may not write to {repo_id} (403{said}): give it write permission there at {TOKENS_PAGE}, or "
            "name a repository of your own"
        )
    if status == 404:
        return UsageError(
            f"{repo_id} is not there, or the token may not see it (404{said}): check the name, and that the "
            "organisation exists and you are in it"
        )
    if status == 429:
        return HubError(f"the Hub asks for fewer requests (429{said}): try again in some minutes")
    if status >= 500 or status in _BUSY or status in _CONFLICTS:
        return HubError(f"the Hub answers {status}{said}: try again later")
    return UsageError(f"the Hub refuses it ({status}{said}): change what it names")


def _answer(error: BaseException) -> HfHubHTTPError | None:
    return next((one for one in _causes(error) if isinstance(one, HfHubHTTPError)), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _is_of_xet(error: BaseException) -> bool:
    """hf_xet raises from compiled code, so the innermost frame of Python's is the one that called it."""
    its_own = type(error).__name__.startswith("Xet") or isinstance(error, RuntimeError | ConnectionError | TimeoutError)
    return its_own and error.__cause__ is None and _raised_in(error) in _CALLERS_OF_XET


def _raised_in(error: BaseException) -> str:
    """The module of the innermost frame of Python's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")) if trace is not None else ""


def _last_lines(text: str) -> str:
    return " ".join(text.split("\n")[1:]) or text
