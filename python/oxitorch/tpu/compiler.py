"""Options that XLA compiles with."""

from oxitorch import _activate

from .modes import _Restore


def custom_compiler_options(options: dict[str, str | int | float | bool]) -> _Restore:
    """Sets XLA options for the programs compiled from here on; also a context manager. They add to those already set.

    Args:
        options: by XLA's names, for instance {"xla_backend_optimization_level": 0}. A name that the plugin does not
            know is an error of the first program that is compiled with it.
    """
    core = _activate.core()
    previous = core.get_compiler_options()
    core.set_compiler_options({**previous, **dict(options)})
    return _Restore(core.set_compiler_options, previous)
