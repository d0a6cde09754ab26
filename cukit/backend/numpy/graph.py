"""Steps that are done again and again. A CPU has no graphs: the twin of the CUDA shelf's."""


def replayed(function):
    """A callable that does what `function()` does, at its lowest cost; results may be overwritten by the next call."""
    return function


def free_replays():
    """Give back the memory of steps that nobody calls any more."""
