"""The layout of a decode step's inputs."""

import numpy as np
import pytest

from cukit.backend import numpy as backend
from cukit.engine.decode_inputs import FIELDS, DecodeInputs


@pytest.mark.parametrize("precise", [np.float32, np.float64])
def test_one_upload_brings_every_field(precise):
    inputs = DecodeInputs(backend, precise, 7, 5)
    for rows, blocks in ((7, 5), (1, 1), (3, 4)):
        host, device = inputs.views(rows, blocks)
        shapes = dict.fromkeys(FIELDS, (rows,)) | {"block_tables": (rows, blocks)}
        for number, (name, shape) in enumerate(shapes.items()):
            view = getattr(host, name)
            assert view.shape == getattr(device, name).shape == shape
            assert view.dtype == (precise if FIELDS.get(name) is float else FIELDS.get(name, np.int32))
            view[...] = 10 * rows + number
        host.upload()
        for number, name in enumerate(shapes):  # fields that overlapped would have lost their numbers
            assert (getattr(host, name) == 10 * rows + number).all() and (
                getattr(device, name) == 10 * rows + number
            ).all()
