"""bench kernels: the time of each array function, beside the bytes it must move, the FLOPs it must do and the limit
they set.
"""

from __future__ import annotations

import difflib
import logging

from . import KernelsBench
from .adapter_cases import adapter_cases
from .cases import Case, Workbench, all_cases
from .measure import Limits, measure_limits, time_calls
from .quantized_cases import quantized_cases
from .report import new_report
from .subject import Subject, choose_subject

logger = logging.getLogger(__name__)
CACHE_BYTES = (
    128 << 20
)  # inputs of this size in turn leave nothing of a call in the cache for the next (an H100 has 50 MB)
MOST_COPIES = 32
HOST_BOUND = 0.9  # a call waits for the host if the host takes at least this share of its time


def run(options: KernelsBench) -> dict:
    """The report: one row a case."""
    subject = choose_subject(options)
    bench = Workbench(subject, options.tokens, options.sequences, options.context, options.batch, options.seed)
    cases = chosen_cases([*all_cases(bench), *adapter_cases(bench), *quantized_cases(bench)], options.only)
    min_seconds = options.batch_milliseconds / 1000
    limits = measure_limits(subject.backend, subject.dtype, min_seconds, options.repeats)
    report = new_report("kernels", subject, options)
    report["weights"] = "random"  # of a folder only the shape is taken
    report["limits"] = {
        "copy_gb_per_s": limits.bytes_per_second / 1e9,
        "product_tflop_per_s": limits.flops_per_second / 1e12,
    }
    report["rows"] = []
    for number, case in enumerate(cases, start=1):
        logger.info("%d of %d: %s (%s)", number, len(cases), case.name, case.shape)
        report["rows"].append(_measure(case, subject, limits, min_seconds, options.repeats))
    return report


def chosen_cases(cases: list[Case], only: list[str] | None) -> list[Case]:
    """The cases of these array functions; ValueError for a name that none has."""
    known = list(dict.fromkeys(case.name for case in cases))
    for name in only or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"only: {name!r} is not measured{hint}; there are {', '.join(known)}")
    return [case for case in cases if only is None or case.name in only]


def _measure(case: Case, subject: Subject, limits: Limits, min_seconds: float, repeats: int) -> dict:
    backend = subject.backend
    function = getattr(backend, case.name)
    try:
        first = case.arguments()
        copies = min(MOST_COPIES, -(-CACHE_BYTES // max(1, _num_bytes(first))))
        inputs = [first, *(case.arguments() for _ in range(copies - 1))]
        timing = time_calls(backend, [lambda given=given: function(*given) for given in inputs], min_seconds, repeats)
    except MemoryError as error:  # CuPy's is one too
        raise ValueError(
            f"{case.name} ({case.shape}) does not fit into the memory of {subject.backend.name}: "
            "lower --tokens, --batch or --context"
        ) from error
    least, limit = limits.least_seconds(case.bytes, case.flops)
    host_bound = backend.name != "cpu" and timing.host_seconds >= HOST_BOUND * timing.seconds
    cold = _num_bytes(first) * copies >= CACHE_BYTES
    notes = [case.note, "host-bound" if host_bound and not case.note else "", "" if cold else "in cache"]
    return {
        "name": case.name,
        "shape": case.shape,
        "microseconds": timing.seconds * 1e6,
        "host_microseconds": timing.host_seconds * 1e6,
        "host_bound": host_bound,
        "bytes": case.bytes,
        "gb_per_s": case.bytes / timing.seconds / 1e9,
        "flops": case.flops,
        "tflop_per_s": case.flops / timing.seconds / 1e12 if case.flops else None,
        "share_of_limit": least / timing.seconds,
        "limit": limit,
        "calls": timing.calls,
        "copies": copies,
        "cold": cold,
        "note": ", ".join(filter(None, notes)),
    }


def _num_bytes(arguments) -> int:
    """Bytes of the arrays among (nested) arguments."""
    if isinstance(arguments, (list, tuple)):
        return sum(map(_num_bytes, arguments))
    return getattr(arguments, "nbytes", 0)
