"""bench kernels, generate, train, grpo, ppo: measure (scale: simulate), print the table, write the rows."""

from typing import Any

from ..bench import BenchOptions, GenerateBench, GRPOBench, KernelsBench, PPOBench, ScaleBench, TrainBench
from ..options import given_values
from ..parallel.config import launched_rank
from ..parallel.world import world
from .parser import make


def bench_kernels(values: dict[str, Any]) -> None:
    from ..bench.kernels import run

    options = make(KernelsBench, values)
    _report(run(options), options)


def bench_generate(values: dict[str, Any]) -> None:
    from ..bench.generate import run

    options = make(GenerateBench, values)
    _report(run(options, given_values(options.engine)), options)


def bench_train(values: dict[str, Any]) -> None:
    from ..bench.train import run

    options = make(TrainBench, values)
    world()  # before anything of CUDA
    _report(run(options), options)


def bench_grpo(values: dict[str, Any]) -> None:
    from ..bench.grpo import run

    options = make(GRPOBench, values)
    world()
    _report(run(options), options)


def bench_ppo(values: dict[str, Any]) -> None:
    from ..bench.ppo import run

    options = make(PPOBench, values)
    _report(run(options), options)


def bench_scale(values: dict[str, Any]) -> None:
    from ..bench.scale import run

    options = make(ScaleBench, values)
    _report(run(options), options)


def _report(report: dict[str, Any], options: BenchOptions | ScaleBench) -> None:
    from ..bench.report import print_report, write_report

    if launched_rank():  # of several processes the first one reports
        return
    print_report(report)
    if options.output:
        write_report(report, options.output)
        print(f"rows: {options.output}")
