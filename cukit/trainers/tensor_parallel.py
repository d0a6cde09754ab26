"""A run's processes as data parallel × tensor parallel: neighbours share each model, and such groups share the work."""

from __future__ import annotations

from typing import Any

from ..engine.tensor_parallel import start
from ..models.decoder import Decoder
from ..models.tensor_parallel import TensorParallel
from ..models.weights import whole_parts
from ..optim import COUNTERS
from ..options import require
from ..parallel.config import TensorOptions
from ..parallel.group import Group


def divided(world: Group, options: TensorOptions | None) -> tuple[Group, TensorParallel | None]:
    """(the ranks that hold this one's part of the models and share the work with it, those that share its models or
    None). Every rank calls it; ValueError in one line where the sizes do not fit.
    """
    size = 1 if options is None else options.tensor_parallel_size
    if options is None or size == 1:
        return world, None
    require(
        world.size % size == 0,
        f"tensor_parallel_size={size} needs processes in multiples of {size}, and this run has {world.size}: "
        f"{start(size)}, or give tensor_parallel_size=1",
    )
    first = world.rank // size * size
    sharing = world.part(range(first, first + size))
    across = world.part(range(world.rank % size, world.size, size))
    assert sharing is not None and across is not None, "a rank is in its own groups"
    return across, TensorParallel(sharing, options.tensor_parallel_invariant)


def check_plays_alone(environments: Any, size: int) -> None:
    """ValueError in one line where there are environments, or None, and so many ranks share a model."""
    if environments is not None and size > 1:
        raise ValueError(
            f"tensor_parallel_size={size} processes compute the same steps, which an environment that each of them "
            "plays may part: leave out environment and tools, or tensor_parallel_size"
        )


def whole_states(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state_dict() with whole arrays; of a model that ranks share on the first of them alone, and all of
    them call it.
    """
    if getattr(model, "tensor", None) is None:
        return state
    own = {name: array for name, array in state.items() if name != COUNTERS}
    return {COUNTERS: state[COUNTERS]} | whole_parts(model, own, part_of)


def own_states(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """What whole_states() gave, as this rank's optimizer takes it back."""
    if getattr(model, "tensor", None) is None:
        return state
    own = {name: own_share(model, part_of(name), array) for name, array in state.items() if name != COUNTERS}
    return {COUNTERS: state[COUNTERS]} | own


def own_share(model: Decoder, part: str, whole: Any) -> Any:
    """This rank's share of an array in the shape of a whole part."""
    return whole if model.tensor is None else whole[model.tensor.own(part, whole.shape)]


def part_of(name: str) -> str:
    """The part that a state is of: model.norm.weight.exp_avg -> model.norm.weight"""
    return name.rpartition(".")[0]
