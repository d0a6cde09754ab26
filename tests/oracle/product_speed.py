"""The product in order (kernels/linear.cu) beside cuBLAS, launches one after the other. Needs a GPU.

python tests/oracle/product_speed.py
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from cukit.backend import backend_for  # noqa: E402
from cukit.backend.cuda.exact import cublas_product, in_order_product  # noqa: E402
from cukit.bench.measure import time_calls  # noqa: E402


def main():
    backend = backend_for("cuda")
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


if __name__ == "__main__":
    main()
