"""The product in order (kernels/linear.cu, linear_few.cu) beside cuBLAS. Needs a GPU.

python tests/oracle/product_speed.py [--few]

--few (20 s): few rows, 20 products in a CUDA graph. The weights take turns through more than 60 MB, so that they come
from memory (those of less than 300 kB from the second cache). Otherwise also launches one after the other, which the
host may bound.
"""

import argparse
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from cukit.backend import backend_for  # noqa: E402
from cukit.backend.cuda.exact import TILES, cublas_product, in_order_product, in_order_tile  # noqa: E402
from cukit.bench.measure import random_array, time_calls  # noqa: E402

FEW = ((2048, 12288), (2048, 4096), (4096, 4096), (24576, 4096), (32, 4096), (8, 1024), (12288, 32))
LAUNCHES, COLD_BYTES, MOST_GRAPHS = 20, 64_000_000, 12


def large_tiles(x, w):
    return in_order_product(x, w, tile=TILES[-1])


def few_rows(backend):
    dtype, generator = np.dtype(ml_dtypes.bfloat16), np.random.default_rng(0)
    print("few rows in a graph, bfloat16, us a product; GB/s: w, x and y once\n(outs, ins) rows: cuBLAS, ", end="")
    print(f"in order in tiles of {TILES[-1]}, in order in the tile for the shape")
    for outs, ins in FEW:
        wanted = -(-COLD_BYTES // (outs * ins * 2))  # weights
        graphs = min(MOST_GRAPHS, -(-wanted // LAUNCHES))
        count = max(2, min(wanted, graphs * LAUNCHES))
        weights = random_array(backend, generator, (count, outs, ins), dtype, ins**-0.5)
        for rows in (1, 16, 64):
            x = random_array(backend, generator, (rows, ins), dtype)
            products = cublas_product, large_tiles, in_order_product
            times = [graph_seconds(backend, product, x, weights, graphs) for product in products]
            rate = (outs * ins + rows * (outs + ins)) * 2 / times[-1] / 1e9
            words = ", ".join(f"{seconds * 1e6:.1f}" for seconds in times)
            print(f"({outs}, {ins}) {rows}: {words} {in_order_tile(rows, outs)} {rate:.0f} GB/s", flush=True)


def graph_seconds(backend, product, x, weights, graphs):
    """Seconds of a product, measured over graphs of LAUNCHES of them."""
    shared = backend.Graphs()

    def step(number):
        def run():
            for launch in range(LAUNCHES):
                product(x, weights[(number * LAUNCHES + launch) % len(weights)])

        return shared.graphed(run)

    steps = [step(number) for number in range(graphs)]
    for run in steps * 2:  # plainly, then captured
        run()
    return time_calls(backend, steps, 0.01, 3).seconds / LAUNCHES


def one_by_one(backend):
    for dtype in map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32)):
        for outs, ins in ((1024, 3072), (6144, 1024), (211, 48), (33, 24)):
            for rows in (1, 64, 256, 4096):
                x, w = backend.zeros((rows, ins), dtype), backend.zeros((outs, ins), dtype)
                cublas, ours = (
                    time_calls(backend, [lambda product=product: product(x, w)], 0.02, 5).seconds
                    for product in (cublas_product, in_order_product)
                )
                print(
                    f"{dtype.name} ({outs}, {ins}), {rows} rows: cuBLAS {cublas * 1e6:.1f} us, in order "
                    f"{ours * 1e6:.1f} us "
                    f"= {2 * rows * outs * ins / ours / 1e12:.1f} TFLOP/s"
                )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--few", action="store_true", help="only the table of few rows")
    backend, options = backend_for("cuda"), parser.parse_args()
    few_rows(backend)
    if not options.few:
        one_by_one(backend)


if __name__ == "__main__":
    main()
