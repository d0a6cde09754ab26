"""gradient_checkpointing of the measurements that have no trainer."""

from __future__ import annotations

from ..engine.memory import plan_memory
from ..engine.shapes import ModelUse, adapted
from ..models.decoder import Decoder


def level_for(given: str, models: list[Decoder], tokens: int, micro_batches: int) -> str:
    """The level that is given; of auto the fastest at which the planner finds room to train these models, in passes of
    at most so many tokens.
    """
    if given != "auto":
        return given
    uses = []
    for number, model in enumerate(models):
        config, gathers = model.own_config, model.tensor is not None and model.tensor.invariant
        head = config.head == "lm_head"
        use = ModelUse(f"model {number}", config, model.dtype, True, True, head=head, gathers=gathers)
        uses.append(use if model.adapter is None else adapted(use, model.adapter.config, model.adapter.way))
    sizes = {"max_tokens_per_batch": tokens, "micro_batches": micro_batches}
    return plan_memory(uses, None, models[0].backend, gradient_checkpointing="auto", **sizes).level
