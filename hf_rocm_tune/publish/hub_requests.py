"""Limits for the requests of `huggingface_hub`: none waits for ever, and what is logged of them holds no secret.

Both are set once for the process and stay: changing the client while another thread uses it (a dataset that is streamed
during the training) would close it under its feet. A client factory of the user's own stays in use; our limit counts
where it sets none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import httpx2
from huggingface_hub import set_client_factory
from huggingface_hub.utils import _http as upstream_http

from hf_rocm_tune.publish.privacy import Private, scrub_text


def guard_requests(answer_s: float, private: Private) -> None:
    """Set the limits.

    Args:
        answer_s: seconds without any byte sent or received after which a request has failed. Upstream waits for ever.
        private: its secrets do not get into the log; those of earlier calls do not either.
    """
    now: Callable[[], httpx2.Client] = upstream_http._GLOBAL_CLIENT_FACTORY
    if not isinstance(now, _Bounded) or now.answer_s != answer_s:
        inner = now.inner if isinstance(now, _Bounded) else now
        set_client_factory(_Bounded(inner, answer_s))
    _CLEANER.learn(private)
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_CLEANER)  # adding it again changes nothing


class _Bounded:
    """A client factory whose clients have a limit."""

    def __init__(self, inner: Callable[[], httpx2.Client], answer_s: float) -> None:
        self.inner, self.answer_s = inner, answer_s

    def __call__(self) -> httpx2.Client:
        client = self.inner()
        if client.timeout == httpx2.Timeout(None):
            client.timeout = httpx2.Timeout(self.answer_s)
        return client


class _Cleaner(logging.Filter):
    """Takes secrets, and the query part of addresses (signatures of uploads), out of log records."""

    def __init__(self) -> None:
        super().__init__()
        self._known: list[Private] = []

    def learn(self, private: Private) -> None:
        """Know these secrets too."""
        if private not in self._known:
            self._known.append(private)

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrites the record; it is always shown."""
        text = record.getMessage()
        for private in self._known:
            text = scrub_text(text, private, names=False)
        words = {word for word in text.split() if "://" in word and "?" in word}
        for word in words:
            text = text.replace(word, word.partition("?")[0])
        record.msg, record.args = text, ()
        return True


_CLEANER = _Cleaner()
