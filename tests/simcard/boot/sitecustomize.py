"""Puts the simulated card below torch, when torch is imported, in every process that has SIMCARD=1 and this directory
on PYTHONPATH."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class _Finder:
    """Finds modules as ever, and wraps the execution of two: torch's, before which the library must be loaded and
    after which ``torch.cuda`` is told, and that of Triton's driver."""

    def find_spec(self, name, path=None, target=None):
        if name == "bitsandbytes.backends.cuda.ops" and os.environ.get("SIMCARD_GFX1100") != "1":
            return spec_from_file_location(name, f"{PACKAGE}/quantised.py")
        if name not in ("torch", "triton.runtime.driver"):
            return None
        spec = PathFinder.find_spec(name, path)
        stock = spec.loader.exec_module

        def exec_torch(module):
            simcard = _package()
            simcard.before_torch()
            stock(module)
            simcard.after_torch()

        def exec_driver(module):
            stock(module)
            sys.modules["simcard.card"].refuse_to_compile(module)

        spec.loader.exec_module = exec_torch if name == "torch" else exec_driver
        return spec


def _package():
    """The package around this directory, by the name ``simcard``, wherever the checkout is."""
    spec = spec_from_file_location("simcard", f"{PACKAGE}/__init__.py", submodule_search_locations=[PACKAGE])
    sys.modules["simcard"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if os.environ.get("SIMCARD") == "1":
    sys.meta_path.insert(0, _Finder())
