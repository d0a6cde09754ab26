"""What a test asks about processes."""

from contextlib import suppress

import psutil


def running_children(process: psutil.Process, words: str = "") -> list[psutil.Process]:
    """The processes that `process` and its children have started and that run, with `words` in their command line.

    A process may end while it is looked at.
    """
    found = []
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and words in " ".join(child.cmdline()):
                found.append(child)
    return found
