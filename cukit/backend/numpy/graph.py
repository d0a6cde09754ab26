"""Steps that are run again and again: the twin of the CUDA shelf's file. A CPU has no graphs: steps are just called."""


class Graphs:
    """Steps that share memory. nbytes: what they will take of it."""

    def __init__(self, nbytes=0):
        pass

    def graphed(self, function):
        """A callable that does what `function()` does, at its lowest cost; a step's results may be overwritten by the
        next call of any step.
        """
        return function
