"""The bar: on a terminal only, and gone when it is done."""

from __future__ import annotations

import io

from hf_rocm_tune.doctor.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_piped_holds_no_bar() -> None:
    stream = io.StringIO()
    with Progress("faults", 3, stream) as bar:
        bar.advance(3)
    assert stream.getvalue() == ""


def test_a_terminal_sees_how_far_it_is_on_one_line_that_is_wiped() -> None:
    stream = Terminal()
    with Progress("faults", 4000, stream) as bar:
        bar.advance(2000)
    assert "faults" in stream.getvalue() and "2,000 of 4,000" in stream.getvalue()
    assert "#" * 15 + "." * 15 in stream.getvalue()
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
