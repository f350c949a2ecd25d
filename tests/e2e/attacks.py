"""What may happen to a run from below: bits of its files flip between two of its lines.

Nothing of the package is replaced: an audit hook of the interpreter sees every file that Python opens, and harms one
just before that.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any


def begin(attack: dict[str, Any]) -> None:
    """Flips one bit of a file each time that it, or another file, is opened, from the n-th time on.

    Args:
        attack: ``file``, the name of what is harmed; ``when``, of what is opened beside it, by default the same;
            ``in``, the name of their directory, by default any; ``nth`` (from 1 on); ``times``, 1 by default; ``seed``
            of the places of the bits; ``within``, so many first bytes, by default all.
    """
    chooser = random.Random(attack.get("seed", 0))
    when, first = attack.get("when", attack["file"]), attack["nth"]
    last = first + attack.get("times", 1) - 1
    seen, busy = [0], [False]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or busy[0] or not isinstance(arguments[0], str | os.PathLike):
            return
        path = Path(os.fsdecode(arguments[0]))
        if path.name != when or attack.get("in", path.parent.name) != path.parent.name:
            return
        victim = path.with_name(attack["file"])
        if not victim.is_file():
            return
        seen[0] += 1
        if first <= seen[0] <= last:
            busy[0] = True
            _flip(victim, chooser, attack.get("within", sys.maxsize))
            busy[0] = False

    sys.addaudithook(watch)


def _flip(victim: Path, chooser: random.Random, within: int) -> None:
    with open(victim, "r+b", buffering=0) as file:
        place = chooser.randrange(min(within, os.fstat(file.fileno()).st_size))
        file.seek(place)
        bit = bytes([file.read(1)[0] ^ 1 << chooser.randrange(8)])
        file.seek(place)
        file.write(bit)
    print(f"attack: bit of byte {place} of {victim} flipped", file=sys.stderr, flush=True)
