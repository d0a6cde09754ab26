"""What a decode step reads, in one block of memory on the host and one on the device: a single copy brings a step's
inputs.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

# Name -> dtype of one entry a row; float stands for the model's accumulator. The widest first, so that each is aligned.
FIELDS = {
    "slot_mapping": np.int64,  # where the newest token's keys and values go; -1: nowhere
    "seeds": np.uint64,
    "draw_positions": np.int64,  # where in its sequence the drawn token will stand
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "top_k": np.int32,
    "tokens": np.int32,
    "positions": np.int32,
    "context_lens": np.int32,  # 0: a row that only fills the step up
}


class DecodeInputs:
    """Room for a step of max_rows rows with max_blocks blocks each, and views of it for smaller steps, which begin at
    the same address.
    """

    def __init__(self, backend, precise, max_rows: int, max_blocks: int):
        self._backend, self._precise = backend, np.dtype(precise)
        nbytes = self._layout(max_rows, max_blocks)[1]
        self._host, self._device = backend.host_buffer(nbytes), backend.empty((nbytes,), np.uint8)

    def views(self, rows: int, blocks: int) -> tuple[SimpleNamespace, SimpleNamespace]:
        """(host, device): each field (rows,), and block_tables (rows, blocks). host.upload() copies all of them to the
        device's.
        """
        layout, nbytes = self._layout(rows, blocks)
        host, device = (
            SimpleNamespace(
                **{name: buffer[start:stop].view(dtype).reshape(shape) for name, dtype, shape, start, stop in layout}
            )
            for buffer in (self._host, self._device)
        )
        source, target = self._host[:nbytes], self._device[:nbytes]
        host.upload = lambda: self._backend.upload(target, source)
        return host, device

    def _layout(self, rows: int, blocks: int) -> tuple[list, int]:
        """([(name, dtype, shape, first byte, end)], bytes in all)."""
        layout, end = [], 0
        for name, dtype in [*FIELDS.items(), ("block_tables", np.int32)]:
            dtype = self._precise if dtype is float else np.dtype(dtype)
            shape = (rows, blocks) if name == "block_tables" else (rows,)
            start, end = end, end + dtype.itemsize * rows * (blocks if name == "block_tables" else 1)
            layout.append((name, dtype, shape, start, end))
        return layout, end
