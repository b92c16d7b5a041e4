"""A file of PyTorch's as a module, read with other words in some places and line by line the same."""

import importlib.util
import re
import sys
import types
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path

# What to look for, and what stands there instead.
Words = Iterable[tuple[re.Pattern[str], str]]


class Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, words: Words):
        super().__init__(name, path)
        self.words = words

    def get_code(self, fullname):
        return self.source_to_code(self.get_data(self.path), self.path)  # never what is cached, of other words

    def source_to_code(self, data, path, *, _optimize=-1):
        text = data.decode()
        for pattern, instead in self.words:
            text = pattern.sub(instead, text)
        return super().source_to_code(text, path, _optimize=_optimize)


def load(path: Path, words: Words) -> types.ModuleType:
    """The file, which has no `.py` here."""
    loader = Loader(path.name, f"{path}.py", words)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(path.name, loader))
    sys.modules[path.name] = module
    loader.exec_module(module)
    return module
