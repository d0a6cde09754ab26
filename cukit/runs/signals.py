"""Ctrl-C and SIGTERM: a run ends soon, and with a state that can be resumed."""


class RunStopped(BaseException):
    """A phase that changes no weight was cut short, because the run was asked to stop.

    No Exception, so that `except Exception` in a reward does not swallow it.
    """
