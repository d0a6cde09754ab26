"""AdamW in place (Loshchilov & Hutter 2019), and the sum of squares for clipping."""

import math

import numpy as np

CHUNK = 1 << 20  # elements worked on at a time, so that a large matrix needs no temporaries of its own size


def adamw_step(master, m, v, grad, param, lr, beta1, beta2, eps, weight_decay, step, grad_scale):
    """One update of master, m, v and param (= master rounded to its own dtype; may be the same array), all of one size,
    contiguous.

    g = grad·grad_scale; m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g²;
    master −= lr·(weight_decay·master + (m/(1−β1^step)) / (sqrt(v/(1−β2^step)) + eps)). step counts from 1.
    """
    same = param is master
    master, m, v, grad, param = (x.reshape(-1) for x in (master, m, v, grad, param))
    step_size, root_correction = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    for start in range(0, master.size, CHUNK):
        part = slice(start, start + CHUNK)
        w, first, second = master[part], m[part], v[part]
        g = grad[part].astype(w.dtype, copy=False) * w.dtype.type(grad_scale)
        first += (g - first) * (1 - beta1)
        second *= beta2
        second += (1 - beta2) * g * g
        w *= 1 - lr * weight_decay
        w -= step_size * first / (np.sqrt(second) / root_correction + eps)
        if not same:
            param[part] = w.astype(param.dtype)


def sum_of_squares(arrays):
    """Σ over all elements of all arrays, in float64; NaN and infinity come through."""
    total = 0.0
    for x in arrays:
        flat = x.reshape(-1)
        for start in range(0, flat.size, CHUNK):
            part = flat[start : start + CHUNK].astype(np.float64)
            total += float(part @ part)
    return total
