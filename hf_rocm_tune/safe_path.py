"""Imports nothing from the working directory, which ``python -m`` looks through before all else.

A ``yaml.py`` that lies beside somebody's data would be run. The package imports this first, and here nothing may be
imported that Python has not loaded itself, not even ``__future__``. Not covered: what Python imports before it finds
this package; ``hf-rocm-tune`` and ``python -P`` have no such moment.
"""

import os
import sys

_PACKAGE = __name__.partition(".")[0]


def leave_working_directory() -> None:
    """Take the working directory out of the search, where the program that runs is one of ours.

    What a user's own program imports is theirs to say. Processes that this one starts are told the same by
    PYTHONSAFEPATH, unless the package itself is found in the working directory only: then that is looked through last.
    """
    by_name = sys.argv[:1] == ["-m"] and any(f"{word}.".startswith(f"{_PACKAGE}.") for word in sys.orig_argv)
    if not by_name and os.path.basename(sys.argv[0] if sys.argv else "") != "hf-rocm-tune":
        return
    if by_name and not sys.flags.safe_path and sys.path[:1] == [_here()]:
        del sys.path[0]
    if any(finder.find_spec(_PACKAGE, None) for finder in sys.meta_path if hasattr(finder, "find_spec")):
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    else:
        sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


leave_working_directory()
