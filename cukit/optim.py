"""AdamW over a store of weights: float32 master weights, lean states, gradient clipping, loss scaling for float16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .autograd import Parameter
from .backend.dtypes import DTYPES
from .backend.states import MOMENT_BYTES, Update, blocks_of, decode_blocks, encode_blocks, join_master, split_master
from .models.store import PIECES, Bucket, Slot, Store

GROWTH_INTERVAL = 400  # finite steps after which the loss scale of float16 doubles (Precision-RL's value)
MAX_LOSS_SCALE = 2.0**24
COUNTERS = "optimizer.counters"
BUCKET_KEY = 0x9E3779B97F4A7C15  # the seeds of two buckets lie this far apart

KINDS = ("exp_avg", "exp_avg_sq", "master")


class _State:
    """What AdamW keeps of a bucket: arrays of its layout.

    exp_avg, exp_avg_sq: in float32 or better, in bfloat16, or as codes (uint8); then NAME.exponents are those of their
    blocks. master: none if the weights are wide enough; of bfloat16 weights the int16 remainders, which with the
    weights are the float32 masters; of float16 the float32 masters.

    offload: the arrays lie in the host's memory, and on the device only while the bucket is updated.
    """

    def __init__(self, bucket: Bucket, form: str, offload: bool):
        be, wide = bucket.backend, bucket.backend.accumulator(bucket.dtype)
        matrices = any(len(slot.parameter.shape) > 1 for slot in bucket.slots)
        form = form if matrices else "float32"  # vectors are few
        kind = {"float32": wide, "bfloat16": DTYPES["bfloat16"], "int8": np.dtype(np.uint8)}[form]
        wanted = {"exp_avg": (bucket.size, kind), "exp_avg_sq": (bucket.size, kind)}
        if form == "int8":
            blocks = blocks_of(bucket.size), np.dtype(np.uint8)
            wanted |= {"exp_avg.exponents": blocks, "exp_avg_sq.exponents": blocks}
        remainder = bucket.dtype == DTYPES["bfloat16"]
        if bucket.dtype != wide:
            wanted["master"] = bucket.size, np.dtype(np.int16) if remainder else wide
        self.bucket, self.offload = bucket, offload
        self.arrays: dict[str, Any] = {}
        for name, (size, dtype) in wanted.items():
            on_host = offload and be.host_buffer(size * dtype.itemsize).view(dtype)
            self.arrays[name] = on_host if offload else be.zeros((size,), dtype)
        if "master" in wanted and not remainder:
            self.arrays["master"][...] = self._like(bucket.data, wide)

    def _like(self, array, dtype):
        """A copy of an array of host or device, where the state's own arrays are."""
        be = self.bucket.backend
        return be.to_numpy(array).astype(dtype) if self.offload else be.array(array, dtype)

    def update(self, arrays: dict[str, Any], part: slice, weight_decay: float, seed: int) -> Update:
        """The update of these elements. arrays: the state's own, on the device (in_turn)."""
        bucket = self.bucket
        exponents = arrays.get("exp_avg.exponents"), arrays.get("exp_avg_sq.exponents")
        weights, moments = bucket.data, (arrays["exp_avg"], arrays["exp_avg_sq"])
        own = arrays.get("master", weights), *moments, bucket.grad, weights
        return Update(*own, part, weight_decay, seed, bucket.origin, *exponents)

    def flat(self, kind: str):
        """An array of the bucket's layout as a checkpoint holds it: the state's own where it is one, else a host copy;
        None where the weights are the master.
        """
        be, array, exponents = self.bucket.backend, self.arrays.get(kind), self.arrays.get(f"{kind}.exponents")
        if self.offload:
            be.synchronize()  # the last update's copies to the host
        if exponents is not None:
            values = decode_blocks(be.to_numpy(array), be.to_numpy(exponents), kind == "exp_avg")
            return values.astype(DTYPES["bfloat16"])  # exact
        if array is not None and array.dtype == np.int16:
            return join_master(be.to_numpy(self.bucket.data), be.to_numpy(array))
        return array

    def load(self, kind: str, found: list[tuple[Slot, slice, Any]]) -> None:
        """Take back what flat() gave, in any form: (slot, rows of its parameter, host or device array) of each part."""
        be, own = self.bucket.backend, self.arrays[kind]
        be.synchronize()
        if f"{kind}.exponents" in self.arrays:
            flat = np.zeros((self.bucket.size,), np.float32)
            for slot, rows, array in found:
                slot.view(flat)[rows] = be.to_numpy(array)
            for name, array in zip((kind, f"{kind}.exponents"), encode_blocks(flat, kind == "exp_avg")):
                self.arrays[name][...] = self._like(array, np.uint8)
            return
        for slot, rows, array in found:
            if own.dtype == np.int16:
                weights, array = split_master(be.to_numpy(array).astype(np.float32, copy=False))
                slot.view(self.bucket.data)[rows] = be.array(weights)
            slot.view(own)[rows] = self._like(array, own.dtype)


def in_turn(states: list[_State]) -> Iterator[dict[str, Any]]:
    """The arrays of each state where its bucket is, to be updated in place before the next is asked for.

    Of offloaded states two lie on the device: while one is updated and goes back, the next one comes. The two ways of
    the bus run at the same time.
    """
    if not states or not states[0].offload:
        yield from (state.arrays for state in states)
        return
    be = states[0].bucket.backend
    up, down = be.SideCopies(), be.SideCopies()
    under_way: list[tuple[Any, Any]] = []  # copies that their memory must outlive

    def brought(state: _State) -> dict[str, Any]:
        found = {name: be.empty(array.shape, array.dtype) for name, array in state.arrays.items()}
        under_way.extend((up, up.upload(found[name], array)) for name, array in state.arrays.items())
        return found

    def join() -> None:
        while under_way:
            copies, copy = under_way.pop()
            copies.join(copy)

    try:
        coming = brought(states[0])
        for place, state in enumerate(states):
            join()  # this one has come, and the one before has gone
            found = coming  # the memory of the one before is free for the next
            coming = brought(states[place + 1]) if place + 1 < len(states) else {}
            yield found
            under_way.extend((down, down.download(array, found[name])) for name, array in state.arrays.items())
    finally:
        join()


class AdamW:
    """AdamW on float32 master weights (the weights themselves if they are float32 or float64), moments of that dtype
    unless state_form says less: "bfloat16" or "int8" (backend/states.py), for matrices; seed keys their rounding.

    offload: the states lie in the host's memory; two buckets' are on the device while one of them is updated.

    decay(parameter) says which parameters weight_decay applies to (default: matrices, not norm weights and biases). A
    parameter without a gradient stays as it is, its moments too. scales_loss: move loss_scale (default: if weights are
    float16; an adapter's are float32, and its model's activations may be float16).
    """

    def __init__(
        self,
        store: Store,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        decay: Callable[[Parameter], bool] | None = None,
        scales_loss: bool | None = None,
        state_form: str = "float32",
        seed: int = 0,
        offload: bool = False,
    ):
        self.store = store
        self.lr, self.betas, self.eps, self.max_grad_norm = lr, betas, eps, max_grad_norm
        self.weight_decay = weight_decay
        if state_form not in MOMENT_BYTES:
            raise ValueError(f"optimizer_state {state_form!r} is not known: choose {', '.join(MOMENT_BYTES)}")
        self.state_form, self.seed, self.offload = state_form, seed, offload
        self._decays = decay or (lambda parameter: len(parameter.shape) > 1)
        self.step_count = 0  # updates that were applied
        self.skipped = 0  # updates that were not, because the gradient was not finite
        half = scales_loss
        if half is None:
            half = any(parameter.dtype == np.float16 for parameter in self.parameters)
        self.loss_scale = 2.0**16 if half else 1.0  # multiply the loss by this before backward()
        self._dynamic_scale, self._finite_in_a_row = half, 0
        self._states: dict[Bucket, _State] = {}
        self._sums: dict[Bucket, Any] = {}  # of squares, of the layers of an update that is made layer by layer
        self._begun = False  # a layer of it was updated
        for parameter in self.parameters:
            self._state(parameter.slot.bucket)

    @property
    def parameters(self) -> list[Parameter]:
        """Those that are trained."""
        return [parameter for parameter in self.store.parameters if parameter.requires_grad]

    def _state(self, bucket: Bucket) -> _State:
        if bucket not in self._states:
            self._states[bucket] = _State(bucket, self.state_form, self.offload)
        return self._states[bucket]

    @property
    def scales_loss(self) -> bool:
        """Whether float16 weights make it move loss_scale."""
        return self._dynamic_scale

    def zero_grad(self):
        self.store.zero_grad()

    def step(self, lr: float | None = None) -> tuple[float, bool]:
        """One update from the gradients, clipped by min(1, max_grad_norm / (norm + 1e-6)) as torch does, then
        zero_grad().

        Returns (gradient norm before clipping, whether weights were updated). Where nothing has a gradient, nothing
        changes, counters included: (0.0, False). A norm that is not finite changes no weight: the update is counted in
        `skipped`, and float16 halves its loss scale.
        """
        if not any(parameter.slot.has_gradient for parameter in self.parameters):
            return 0.0, False
        lr = self.lr if lr is None else lr
        # while the device is busy with the backward pass, for which the norm waits
        ready = None if self.offload else self._steps(self.store.buckets, lr)
        norm = self._grad_norm()
        finite = math.isfinite(norm)
        if finite:
            clip = min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm > 0 else 1.0
            self.step_count += 1
            self._update_buckets(self.store.buckets, lr, clip / self.loss_scale, ready)
        else:
            self.skipped += 1
        self._adapt_loss_scale(finite)
        self.zero_grad()
        return norm, finite

    def step_layer(self, buckets: list[Bucket], lr: float) -> None:
        """Update these buckets of an update from their gradients, unclipped, and drop them; where they are not finite,
        the buckets stay as they are. end_layers() ends the update. The bits are those of step() without clipping.
        """
        be, found = self.store.backend, [bucket for bucket in buckets if bucket.grad is not None]
        if not found:
            return
        sums = be.sums_of_squares([bucket.grad for bucket in found], PIECES)
        self._sums |= zip(found, sums)
        if math.isfinite(be.sum_in_order(sums)):
            self.step_count += not self._begun
            self._begun = True
            self._update_buckets(found, lr, 1.0)
        for bucket in found:
            bucket.free_grad()

    def end_layers(self) -> tuple[float, bool]:
        """End an update that step_layer() made: what step() returns. With a layer that was not finite, the norm is not,
        and `skipped` counts the update, although other layers were updated.
        """
        be, updated = self.store.backend, self._begun
        rows = [self._sums[bucket] for bucket in self.store.buckets if bucket in self._sums]
        self._sums, self._begun = {}, False
        if not rows:
            return 0.0, False
        sums = be.empty((len(rows), PIECES), rows[0].dtype)
        for place, row in enumerate(rows):
            sums[place] = row
        norm = math.sqrt(be.sum_in_order(sums))
        self.skipped += not math.isfinite(norm)
        return norm, updated

    def _grad_norm(self) -> float:
        """Global L2 norm of the gradients of the unscaled loss; NaN or infinity where a gradient is not finite.

        Each piece of a bucket is summed, then the pieces in order. So ranks that hold whole pieces get the bits of one
        that holds all.
        """
        be, tensor = self.store.backend, self.store.tensor
        if tensor is not None:
            return math.sqrt(tensor.sum_of_squares(self.store, PIECES)) / self.loss_scale
        grads = [bucket.grad for bucket in self.store.buckets if bucket.grad is not None]
        return math.sqrt(be.sum_in_order(be.sums_of_squares(grads, PIECES))) / self.loss_scale

    def _update_buckets(self, buckets: list[Bucket], lr: float, grad_scale: float, ready: Any = None):
        """ready: what _steps() gave for these buckets."""
        settings = *self.betas, self.eps, self.step_count, grad_scale
        if not self.offload:
            (ready or self._steps(buckets, lr))(*settings)
            return
        found = [bucket for bucket in buckets if self._runs(bucket)]
        turns = in_turn([self._state(bucket) for bucket in found])
        for bucket in found:
            self._steps([bucket], lr, next(turns))(*settings)  # zip() would hold the arrays of the turn before
        next(turns, None)  # what was updated last goes back

    def _steps(self, buckets: list[Bucket], lr: float, arrays: dict[str, Any] | None = None) -> Any:
        """The update of these buckets, ready to be made. arrays: of the one bucket's state, on the device; None: the
        states' own.
        """
        updates, places = [], {bucket: place for place, bucket in enumerate(self.store.buckets)}
        for bucket in buckets:
            if runs := self._runs(bucket):
                state, seed = self._state(bucket), (self.seed + places[bucket] * BUCKET_KEY) % 2**64
                own = state.arrays if arrays is None else arrays
                updates += [state.update(own, part, self.weight_decay * decays, seed) for decays, part in runs]
        return self.store.backend.AdamWSteps(updates, lr)

    def _runs(self, bucket: Bucket) -> list[tuple[bool, slice]]:
        """(whether they decay, elements of the bucket's state) of what this optimizer updates."""
        return bucket.runs(self._decays)

    def _adapt_loss_scale(self, finite: bool):
        if not self._dynamic_scale:
            return
        self._finite_in_a_row = self._finite_in_a_row + 1 if finite else 0
        if not finite:
            self.loss_scale = max(self.loss_scale / 2, 1.0)
        elif self._finite_in_a_row == GROWTH_INTERVAL:
            self.loss_scale, self._finite_in_a_row = min(self.loss_scale * 2, MAX_LOSS_SCALE), 0

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """name -> array: for each trained part its moments and, where the weights are half-precision, its float32
        master weights, in the part's shape, free of the store's layout; and the counters as one host array.

        What the optimizer holds in this form is a view; what it holds in another (remainders, codes) is a host copy.
        """
        counters = [self.step_count, self.skipped, self._finite_in_a_row, self.loss_scale]
        arrays: dict[str, Any] = {COUNTERS: np.array(counters, np.float64)}
        for kind in KINDS:
            flats = {bucket: self._flat(bucket, kind) for bucket in self._trained_buckets()}
            views = self.store.part_views(flats.get)
            arrays |= {f"{name}.{kind}": view for name, view in views.items() if self._is_trained(name)}
        return arrays

    def _flat(self, bucket: Bucket, kind: str) -> Any:
        return self._state(bucket).flat(kind)

    def _load(self, bucket: Bucket, kind: str, found: list[tuple[Slot, slice, Any]]) -> None:
        self._state(bucket).load(kind, found)

    def _trained_buckets(self) -> list[Bucket]:
        return list(dict.fromkeys(parameter.slot.bucket for parameter in self.parameters))

    def _is_trained(self, part: str) -> bool:
        return self.store.parts[part][0].requires_grad

    def load_state_dict(self, state: dict[str, Any]):
        """Take back what state_dict() gave, host arrays included; ValueError for a missing or wrongly shaped one.

        Moments of another form are converted: to bfloat16 and to codes they are rounded to the nearest. With
        bfloat16 weights the master sets the weights too. Older checkpoints hold whole parameters
        (layers.0.self_attn.qkv_proj.weight.exp_avg); they are read too.
        """
        state, own = self._by_part(state), self._places()
        missing, foreign = sorted((own.keys() | {COUNTERS}) - state.keys()), sorted(state.keys() - own.keys())
        foreign = [name for name in foreign if name != COUNTERS]
        if missing or foreign:
            raise ValueError(
                f"optimizer state does not fit this model: missing {missing[:3]}, unexpected {foreign[:3]}; "
                "resume with the model, dtype and use_peft of the run that saved it"
            )
        groups: dict[tuple[Bucket, str], list] = {}
        for name, (slot, rows, kind) in own.items():
            _check_shape(name, state[name], slot.parameter.data[rows].shape)
            groups.setdefault((slot.bucket, kind), []).append((slot, rows, state[name]))
        for (bucket, kind), found in groups.items():
            self._load(bucket, kind, found)
        counters = np.asarray(state[COUNTERS])
        self.step_count, self.skipped, self._finite_in_a_row = (int(count) for count in counters[:3])
        self.loss_scale = float(counters[3])

    def _places(self) -> dict[str, tuple[Slot, slice, str]]:
        """Name in state_dict() -> (slot, rows of its parameter, kind)."""
        found = {}
        for name, (parameter, rows) in self.store.parts.items():
            if parameter.requires_grad:
                slot = parameter.slot
                kinds = self._state(slot.bucket).arrays.keys() & set(KINDS)
                found |= {f"{name}.{kind}": (slot, rows, kind) for kind in kinds}
        return found

    def _by_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with arrays of whole parameters cut into parts."""
        cut = dict(state)
        for part, (parameter, rows) in self.store.parts.items():
            for kind in KINDS:
                whole = f"{parameter.name}.{kind}"
                if part != parameter.name and whole in state:
                    _check_shape(whole, state[whole], parameter.shape)
                    cut.pop(whole, None)
                    cut[f"{part}.{kind}"] = state[whole][rows]
        return cut


def _check_shape(name, array, shape):
    if tuple(array.shape) != tuple(shape):
        raise ValueError(
            f"optimizer state {name} has shape {tuple(array.shape)}, this model needs {tuple(shape)}: "
            "resume with the model that the checkpoint was made from"
        )
