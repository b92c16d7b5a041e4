"""Calls functions with modules of others when these are imported, so that `import torch` imports none of them."""

import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType


def call(actions: dict[str, Callable[[ModuleType], None]]) -> None:
    """Calls each function with the module of its name: now if that is imported, else when it has been."""
    later = {}
    for name, action in actions.items():
        module = sys.modules.get(name)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            later[name] = action
        else:
            action(module)
    if later:
        sys.meta_path.insert(0, _After(later))


class _After(importlib.abc.MetaPathFinder):
    """Finds modules as ever, and calls a function with each of these when it has been imported."""

    def __init__(self, actions):
        self._actions = actions
        self._here = threading.local()  # the module that this thread looks for in the other finders

    def find_spec(self, name, path, target=None):
        # Looking for a module does not mean to import it.
        if name not in self._actions or getattr(self._here, "name", None) == name:
            return None
        self._here.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._here.name = None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then(module):
                execute(module)
                action = self._actions.pop(name, None)
                if action is not None:
                    action(module)

            spec.loader.exec_module = then
        return spec
