"""Steps that are done again and again. A CPU has no graphs: the twin of the CUDA shelf's."""


class Graphs:
    """Steps that share memory."""

    def graphed(self, function):
        """A callable that does what `function()` does, at its lowest cost; a step's results may be overwritten by the
        next call of any step.
        """
        return function
