"""Exchanges of captured steps and plain ones in turn, on GPUs, and nothing waits between them: mpirun -n 2 python
run_exchanges.py
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cukit.models.tensor_parallel import TensorParallel  # noqa: E402
from cukit.parallel.world import world  # noqa: E402

ROUNDS, SIZES = 40, (8, 5000, 300_000)  # a sum of each size, twice in a step


def main():
    from cukit.backend import backend_for

    group, cuda = world(), backend_for("cuda")
    ranks = TensorParallel(group).on(cuda)
    counters = {size: cuda.zeros((size,), "float32") for size in SIZES}
    graphs = cuda.Graphs()

    def step_of(size):
        def step():
            """counter = counter · size of the group + 1, by its sum over the ranks."""
            for _ in range(2):
                ranks.all_reduce(counters[size])
                parts = ranks.all_parts(counters[size])
                counters[size][...] = parts[group.rank - 1] + 1
            return SimpleNamespace()

        return graphs.graphed(step)

    steps, plain = {size: step_of(size) for size in SIZES}, cuda.zeros((1000,), "float32")
    truth, truths = 0, dict.fromkeys(SIZES, 0)
    for turn in range(ROUNDS):
        for size, step in steps.items():
            step()
            for _ in range(2):
                truths[size] = (truths[size] * group.size + 1) % 4096
            counters[size][...] %= 4096
            plain += group.rank + turn
            ranks.all_reduce(plain)
            plain %= 4096
            truth = (truth * group.size + sum(rank + turn for rank in range(group.size))) % 4096
    for size, counter in counters.items():
        assert (counter == truths[size]).all(), (size, counter[:4], truths[size])
    assert (plain == truth).all(), (plain[:4], truth)
    assert all(step._graph is not None for step in steps.values())
    group.barrier()
    print("exchanges: equal")


main()
