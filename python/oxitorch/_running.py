"""What `torch.tpu.jit` does in this thread, for those who have to know and are no part of it."""

import threading

# `tracer`: the run of a function of which the engine notes a recipe (`jit/_tracing.py`).
# `steps`: while a function runs as one program without a recipe, the numbers of the optimizers that made steps in it.
here = threading.local()


def tracer():
    """The run that is noted in this thread; None: there is none."""
    return getattr(here, "tracer", None)


def steps() -> list[int] | None:
    """Where to note a step, if it does not end a program."""
    return getattr(here, "steps", None)


# What was said of functions that are run anew in each call; of many, the last ones.
run_anew: dict[str, None] = {}
_MOST_RUN_ANEW = 64


def say_run_anew(text: str) -> None:
    """Notes for `torch.tpu.explain()` that a function is run anew in each call."""
    run_anew[text] = None
    if len(run_anew) > _MOST_RUN_ANEW:
        del run_anew[next(iter(run_anew))]
