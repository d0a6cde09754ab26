"""kernels build: compile every kernel ahead of its use."""

import time
from typing import Any

from ..options import Options, option
from .parser import make


class KernelsOptions(Options):
    group = "what to build"
    report: bool = option(False, "print registers, shared memory and spills of each kernel")
    archs: list[str] | None = option(
        None, "only these architectures, for example sm_90a; default: all that a kernel declares"
    )
    families: list[str] | None = option(None, "only these files of kernels/, without .cu")


def kernels_build(values: dict[str, Any]) -> None:
    """For this machine's use, or for a look at registers and spills; needs no GPU."""
    from ..backend import kernel_compiler

    compiler = kernel_compiler()
    options = make(KernelsOptions, values)
    for name, chosen, known in (
        ("families", options.families, compiler.families()),
        ("archs", options.archs, sorted({a for f in compiler.families() for a in compiler.architectures(f)})),
    ):
        if unknown := set(chosen or ()) - set(known):
            raise ValueError(f"{name}: {', '.join(sorted(unknown))} is not known; there are {', '.join(known)}")
    start = time.perf_counter()
    compiled = compiler.build(archs=options.archs, names=options.families)
    if options.report:
        print(compiler.report(compiled))
    print(f"{len(compiled)} modules in {time.perf_counter() - start:.1f} s; they lie in {compiler.cache_folder()}")
