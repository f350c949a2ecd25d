"""Puts the simulated card below torch, when torch is imported, in every process that has SIMCARD=1 and this directory
on PYTHONPATH."""

import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class _Finder:
    """Finds torch as ever, and wraps its execution: the library must be loaded before, ``torch.cuda`` told after."""

    looking = False

    def find_spec(self, name, path=None, target=None):
        if name == "bitsandbytes.backends.cuda.ops" and os.environ.get("SIMCARD_GFX1100") != "1":
            return spec_from_file_location(name, f"{PACKAGE}/quantised.py")
        if name != "torch" or self.looking:
            return None
        self.looking = True
        try:
            spec = find_spec("torch")
        finally:
            self.looking = False
        stock = spec.loader.exec_module

        def exec_module(module):
            simcard = _package()
            simcard.before_torch()
            stock(module)
            simcard.after_torch()

        spec.loader.exec_module = exec_module
        return spec


def _package():
    """The package around this directory, by the name ``simcard``, wherever the checkout is."""
    spec = spec_from_file_location("simcard", f"{PACKAGE}/__init__.py", submodule_search_locations=[PACKAGE])
    sys.modules["simcard"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if os.environ.get("SIMCARD") == "1":
    sys.meta_path.insert(0, _Finder())
