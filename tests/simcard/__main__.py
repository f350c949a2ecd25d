"""Builds the simulated card and what executes gfx1100 code, so that no test has to wait for a compiler."""

from __future__ import annotations

from tests import simcard

if __name__ == "__main__":
    try:
        simcard.environment(gfx1100=True)
    except simcard.NoCompiler as missing:
        print(f"tests of the simulated card will be skipped: {missing}")
