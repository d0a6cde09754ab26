"""A LoRA adapter of a decoder (Hu et al. 2021): the base's weights stay frozen, and small factors A and B are trained
beside its linear layers.

Two ways to compute an adapted layer; both have fixed rounding points, the same in decoding and in training:

* beside: y = round(round(x Wᵀ) + round(round(x Aᵀ) (s·B)ᵀ)), three products by the same function as everywhere.
* merged: y = x round(W + s·B·A)ᵀ, one product with a copy of the weight that is made anew after each update.
"""

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..autograd import Parameter, Tensor
from ..ops import Factors, linear_beside, linear_merged, score
from .adapter_config import AdapterConfig
from .host_base import HostBase
from .modules import Linear, Module, declare
from .store import Store

BESIDE, MERGED = WAYS = ("beside", "merged")
PREFIX = "base_model.model.model."  # before the names of parts in PEFT's files
SCORE_PART = "base_model.model.score.weight"  # a reward model's head, in PEFT's files
_numbers = itertools.count()  # an adapter's, never given twice in a process


class LinearAdapter:
    """The adapter of one Linear: what its module calls instead of the plain product."""

    def __init__(self, adapter: "Adapter", linear: Linear, factors: Factors, place: int = 0):
        self.adapter, self.factors, self.place = adapter, factors, place
        self.merged = None
        if adapter.way == MERGED:  # in the weight's own memory, if the base goes to the host
            self.merged = linear.weight.data if adapter.base_on_host else linear.weight.data.copy()

    @property
    def on(self) -> bool:
        return self.adapter.on

    def __call__(self, x: Tensor, linear: Linear) -> Tensor:
        if self.merged is not None:
            return linear_merged(x, self.merged, self.factors, linear.bias)
        return linear_beside(x, linear.weight, self.factors, linear.bias)

    def base_weight(self, linear: Linear) -> Parameter:
        """The layer's weight without the adapter."""
        if self.adapter.base is None:
            return linear.weight
        weight = Parameter(self.adapter.base.weight(self.place))
        weight.requires_grad = False
        return weight

    def change(self, x: Any, linear: Linear) -> tuple[Any, bool]:
        """Of rows x (T, I), an array: (what the base's product is changed by, False), or (merged) (what stands in its
        place, True).
        """
        be, factors = self.adapter.backend, self.factors
        if self.merged is not None:
            return be.linear_forward(x, self.merged, None if linear.bias is None else linear.bias.data), True
        return be.linear_forward(be.linear_forward(x, factors.down), factors.up), False

    def refresh(self, linear: Linear) -> None:
        """Make the copies for products anew, in place: captured steps know their addresses. A base in the host's memory
        has come back.
        """
        f, be = self.factors, self.adapter.backend
        fill_copies(f, be)
        if self.merged is not None:
            for rows, own, columns in f.blocks:
                weight = linear.weight.data[rows]
                be.merge_adapter(self.merged[rows], weight, f.a.data[columns], f.b.data[own], f.scale)


class ScoreAdapter:
    """A reward model's score head as it is trained beside an adapter: weight (1, C), which takes the head's place."""

    def __init__(self, adapter: "Adapter", weight: Parameter):
        self.adapter, self.weight = adapter, weight

    @property
    def on(self) -> bool:
        return self.adapter.on

    def __call__(self, hidden: Tensor, head: Module) -> Tensor:
        return score(hidden, self.weight)


class Adapter:
    """All factors of a decoder, in a store of their own: float32 (float64 for a float64 model), so that an optimizer
    trains them as it does any weights. Making one freezes the decoder's weights and stands in its linear layers.

    way: "beside" or "merged". seed: A is drawn as PEFT does (Kaiming uniform with a = √5: ± 1/√I), on the host, so that
    every device gets the same numbers; B is zeros, so that nothing changes at first. After the factors have changed,
    refresh() brings them into force. base_on_host: the adapted weights of the base lie in the host's memory, and the
    merged copies take theirs; no bit changes. With config.with_score the score head is trained too: a copy of it, as it
    is.
    """

    for_requests = False  # it is the model's own

    def __init__(self, model, config: AdapterConfig, way: str = BESIDE, seed: int = 0, base_on_host: bool = False):
        if way not in WAYS:
            raise ValueError(f"an adapter's way must be one of {', '.join(WAYS)}, got {way!r}")
        if base_on_host and way != MERGED:
            raise ValueError("only a merged adapter leaves the base to the host's memory: beside multiplies with it")
        if model.adapter is not None:
            raise ValueError("the model has an adapter already: merge it first")
        if getattr(model, "tensor", None) is not None:
            raise ValueError("an adapter is of a whole model, and ranks share this one: leave out tensor_parallel_size")
        check_head(model, config)
        self.base_on_host, self.base = base_on_host, None
        self.config, self.way, self.backend, self.number = config, way, model.backend, next_number()
        self._thread = threading.local()
        self.linears: list[tuple[Linear, LinearAdapter]] = []
        parameters, parts, made = {}, {}, []
        for name, linear in adapted_linears(model, config):
            chosen = [part for part in linear.part_rows if part in config.targets]
            factors = declared_factors(linear, chosen, config, model.backend)
            parameters |= {f"{name}.lora_A": factors.a, f"{name}.lora_B": factors.b}
            for part, (_, own, columns) in zip(chosen, factors.blocks, strict=True):
                stem = peft_name(name, part)
                parts |= {f"{stem}.lora_A.weight": (factors.a, columns), f"{stem}.lora_B.weight": (factors.b, own)}
            made.append((linear, factors))
        if config.with_score:
            weight = Parameter(model.score.weight.data)  # the store copies it
            parameters["score.weight"], parts[SCORE_PART] = weight, (weight, slice(None))
            model.score.adapter = ScoreAdapter(self, weight)
        self.store = Store(model.backend, parameters, parts)
        if base_on_host:
            self.base = HostBase(model.backend, [linear.weight.data for linear, _ in made])
        for linear, factors in made:
            self._set_up(linear, factors)
        self._draw(seed)
        model.attach(self)
        self.refresh()

    def _set_up(self, linear: Linear, factors: Factors) -> None:
        make_room(factors, linear, self.backend)
        linear.adapter = LinearAdapter(self, linear, factors, len(self.linears))
        self.linears.append((linear, linear.adapter))

    def _draw(self, seed: int) -> None:
        for index, (name, view) in enumerate(self.parts().items()):
            if ".lora_A." in name:
                bound = 1 / math.sqrt(view.shape[1])
                drawn = np.random.default_rng([seed, index]).uniform(-bound, bound, view.shape)
                view[...] = self.backend.array(drawn.astype(view.dtype))

    # ---- use ----

    def refresh(self) -> None:
        """Bring changed factors into force: casts to the model's dtype and merged copies, made anew in place."""
        for place in range(len(self.linears)) if self.base is None else self.base.bring_back():
            linear, one = self.linears[place]
            one.refresh(linear)

    @property
    def on(self) -> bool:
        """Whether this thread's forward passes have the adapter."""
        return getattr(self._thread, "on", True)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, this thread's forward passes are the base's, and so are the requests that it gives to an engine:
        nothing moves, for either way. A base in the host's memory comes layer by layer, and an engine has no requests
        for it.
        """
        before, self._thread.on = self.on, False
        try:
            yield
        finally:
            self._thread.on = before
            if self.base is not None:
                self.base.drop_ahead()

    def at(self, layer: Any) -> Any:
        """Its part at a layer."""
        return layer.adapter

    def layer_parameters(self, index: int) -> list:
        """The factors of one layer."""
        prefix = f"layers.{index}."
        return [parameter for parameter in self.store.parameters if parameter.name.startswith(prefix)]

    def parts(self) -> dict[str, Any]:
        """PEFT's tensor names -> views of the factors."""
        return self.store.part_views()

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(parameter.shape) for parameter in self.store.parameters)


def check_head(model: Module, config: AdapterConfig) -> None:
    """ValueError for a score head beside a model that has none."""
    if config.with_score and not hasattr(model, "score"):
        raise ValueError(
            "this adapter is a reward model's (task_type SEQ_CLS, or modules_to_save): it has a score head, and the "
            "model has none; give it as a reward, or train a reward model with it"
        )


def next_number() -> int:
    """An adapter's number: it tells its rows, and its KV, from those of others."""
    return next(_numbers)


def declared_factors(linear: Linear, chosen: list[str], config: AdapterConfig, backend) -> Factors:
    """The factors of a layer's chosen parts, side by side, without memory yet."""
    ins, r = linear.weight.shape[1], config.r
    wide = backend.accumulator(linear.weight.dtype)
    blocks, end = [], 0
    for number, part in enumerate(chosen):
        rows = linear.part_rows[part]
        size = rows.stop - rows.start
        blocks.append((rows, slice(end, end + size), slice(number * r, (number + 1) * r)))
        end += size
    a, b = declare((len(chosen) * r, ins), wide), declare((end, r), wide)
    return Factors(a, b, config.scale, None, None, blocks)


def make_room(factors: Factors, linear: Linear, backend) -> None:
    """Memory for the copies that products take, of factors that have theirs."""
    dtype = linear.weight.dtype
    wide = factors.a.dtype == dtype
    factors.down = factors.a.data if wide else backend.zeros(factors.a.shape, dtype)
    factors.up = backend.zeros((linear.weight.shape[0], factors.a.shape[0]), dtype)


def fill_copies(factors: Factors, backend) -> None:
    """The copies that products take, made anew in place."""
    if factors.down is not factors.a.data:
        backend.store_weights(factors.down, factors.a.data)
    wide = backend.zeros(factors.up.shape, factors.b.dtype)
    for rows, own, columns in factors.blocks:
        wide[rows, columns] = factors.b.data[own] * factors.scale
    backend.store_weights(factors.up, wide)


class WithoutAdapter:
    """A decoder as it is without its adapter: the reference model of a run that trains one. It has no memory of its
    own.
    """

    def __init__(self, model):
        self.model = model

    def forward(self, tokens, positions, attend) -> Tensor:
        with self.model.adapter.off():
            return self.model.forward(tokens, positions, attend)

    def scores(self, hidden) -> Tensor:
        with self.model.adapter.off():
            return self.model.scores(hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def weights_in_use(model) -> list:
    """The arrays that a model's forward passes multiply with; a merged copy stands in place of its weight."""
    adapter, parameters = getattr(model, "adapter", None), model.parameters()
    linears = [] if adapter is None else adapter.linears
    copies = {id(linear.weight): one.merged for linear, one in linears if one.merged is not None}
    found = [copies.get(id(parameter), parameter.data) for parameter in parameters]
    return found + [array for _, one in linears for array in (one.factors.down, one.factors.up)]


def peft_name(linear: str, part: str) -> str:
    """What PEFT's tensors of a part begin with: layers.0.self_attn.qkv_proj, k_proj -> ….layers.0.self_attn.k_proj"""
    return PREFIX + ".".join([*linear.split(".")[:-1], part])


def adapted_linears(model: Module, config: AdapterConfig) -> list[tuple[str, Linear]]:
    """(dotted name, Linear) of the linear layers with a part among the adapter's targets."""
    return [
        (name.removesuffix(".weight"), owner)
        for name, _, owner in model.walk_parameters()
        if isinstance(owner, Linear) and name.endswith(".weight") and set(owner.part_rows) & set(config.targets)
    ]


def adapter_sizes(layer: Module, config: AdapterConfig, way: str, base_on_host: bool = False) -> tuple[int, int]:
    """(numbers of the factors, numbers of what else products take) of one layer, or of a whole model: merged copies of
    weights beside them, and zeros where a fused weight's parts have factors of their own.
    """
    factors = copies = 0
    for _, linear in adapted_linears(layer, config):
        outs, ins = linear.weight.shape
        rows = [part.stop - part.start for name, part in linear.part_rows.items() if name in config.targets]
        ranks = len(rows) * config.r
        factors += ranks * ins + sum(rows) * config.r
        copies += ranks * outs - sum(rows) * config.r + (outs * ins if way == MERGED and not base_on_host else 0)
    return factors, copies


def adapter_columns(layer: Module, config: AdapterConfig) -> tuple[int, int]:
    """Numbers a token that products beside the weights of one layer keep for the backward pass (x downᵀ): of all of
    them, and of the last, down_proj.
    """
    ranks = {name: len(set(linear.part_rows) & set(config.targets)) for name, linear in adapted_linears(layer, config)}
    return config.r * sum(ranks.values()), config.r * ranks.get("mlp.down_proj", 0)
