"""What a checkpoint holds of a trainer: named models with their optimizers, by Hugging Face's names of their parts.

The policy's weights (or its adapter's) are the checkpoint folder's own model; every other model lies in the subfolder
of its name. Arrays in trainer_state.safetensors: PART.exp_avg, PART.exp_avg_sq, PART.master and optimizer.counters of
the policy; those of another model begin with NAME/, those of the method (a half-used generation) with method.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..models.adapter_files import fill, is_adapter
from ..models.decoder import Decoder
from ..models.value_head import ValueHead
from ..models.weights import load_model
from ..optim import AdamW
from ..options import say_once
from ..runs.checkpoint import stored_dtype
from ..runs.record import machine
from .ranks import Ranks
from .sharded_weights import ShardedWeights
from .tensor_parallel import own_states, whole_states
from .zero import ShardedAdamW

logger = logging.getLogger(__name__)
POLICY, METHOD = "policy", "method."


@dataclass
class TrainedModel:
    """A model that a run trains. The optimizer is made when the run begins. learning_rate: None is the run's. weights:
    what shares them out among the ranks, None where each has all.
    """

    name: str
    model: Decoder | ValueHead
    optimizer: AdamW | None = None
    learning_rate: float | None = None
    weights: ShardedWeights | None = None

    def peak_rate(self, args) -> float:
        return args.learning_rate if self.learning_rate is None else self.learning_rate


def make_optimizer(model: Decoder | ValueHead, args, ranks: Ranks | None = None) -> AdamW:
    """The AdamW of a model, or of its adapter, as the options say."""
    kind: Any = AdamW
    if args.zero_stage and ranks is not None and ranks.size > 1:
        group = ranks.group
        kind = partial(ShardedAdamW, group=group.on(model.store.backend), host=group, stage=args.zero_stage)
    on_host = model.store.backend.name == "cpu"
    if args.offload_optimizer and on_host:
        say_once(logger, "offload_optimizer changes nothing on a CPU, where all memory is the host's")
    if args.optimizer_in_bwd and model.dtype == np.float16:
        raise ValueError(
            "optimizer_in_bwd=true goes without a loss scale, which float16 needs: train in bfloat16, or leave it out"
        )
    return kind(
        model.trained_store,
        args.learning_rate,
        (args.adam_beta1, args.adam_beta2),
        args.adam_epsilon,
        args.weight_decay,
        args.max_grad_norm,
        scales_loss=model.dtype == np.float16,
        state_form=args.optimizer_state,
        seed=args.seed,
        offload=args.offload_optimizer and not on_host,
    )


def shard_weights(model: Decoder | ValueHead, zero_stage: int, ranks: Ranks) -> ShardedWeights | None:
    """Prepare a model for ZeRO-3; None for a single rank, a head, and frozen weights beside an adapter: all keep them
    whole.
    """
    if zero_stage < 3 or ranks.size == 1 or not isinstance(model, Decoder) or model.adapter is not None:
        return None
    return ShardedWeights(model, ranks.group.on(model.backend))


def run_facts(trainer) -> dict:
    """What run.json says of a run besides its times."""
    model = trainer.model
    return {
        "method": trainer.label,
        "model": trainer.model_name,
        "parameters": model.num_parameters,
        "dtype": str(model.dtype),
        "total_steps": trainer.total_steps,
        "processes": trainer.ranks.world.size,
    } | machine(model.backend)


def state_arrays(models: dict[str, TrainedModel], method: dict) -> dict:
    """name -> array of everything but weights that an exact resume needs; of models that ranks share on the first of
    them, and all of them call it.
    """
    arrays = {METHOD + name: array for name, array in method.items()}
    for name, trained in models.items():
        state = whole_states(trained.model, trained.optimizer.state_dict())
        arrays |= {_prefix(name) + key: array for key, array in state.items()}
    return arrays


def restore(models: dict[str, TrainedModel], arrays: dict, folder: Path) -> dict:
    """Take weights and optimizer states back from a checkpoint; returns the method's arrays.

    ValueError in one line if the checkpoint holds another model, or lacks one.
    """
    method = {name.removeprefix(METHOD): array for name, array in arrays.items() if name.startswith(METHOD)}
    own = {name: array for name, array in arrays.items() if not name.startswith(METHOD)}
    known = tuple(_prefix(name) for name in models if name != POLICY)
    for name, trained in models.items():
        prefix = _prefix(name)
        mine = {
            key.removeprefix(prefix): array
            for key, array in own.items()
            if (key.startswith(prefix) if prefix else not key.startswith(known))
        }
        source = folder / name if prefix else folder
        if prefix and not (source.is_dir() and mine):
            raise ValueError(f"{folder} holds no model {name!r}: it was written by a run without one; start a new run")
        load_weights(trained.model, source)
        if trained.optimizer is not None:  # a rank that does not train has none
            _check_dtype(trained.model, mine, folder, source)
            trained.optimizer.load_state_dict(own_states(trained.model, mine))
    return method


def _check_dtype(model: Decoder | ValueHead, state: dict, folder: Path, source: Path) -> None:
    """ValueError in one line if an optimizer's state is that of weights in another type: half types alone have float32
    masters beside them, and only the checkpoint holds these.
    """
    kinds = {name.rpartition(".")[2] for name in state}
    wanted = any(bucket.dtype.itemsize == 2 for bucket in model.trained_store.buckets)
    if "exp_avg" not in kinds or ("master" in kinds) == wanted:
        return
    saved = stored_dtype(source)
    raise ValueError(
        f"{folder} was saved by a run in {saved}, and this run is in {model.dtype.name}: resume with dtype={saved}, or "
        "begin a new run with that folder as its model"
    )


def _prefix(name: str) -> str:
    return "" if name == POLICY else f"{name}/"


def load_weights(model: Decoder | ValueHead, folder: Path) -> None:
    """Copy the weights of a model folder into a model that exists, part by part; read on the host, so that the device
    holds one copy only. Of a model with an adapter: the adapter's.
    """
    if isinstance(model, Decoder) and model.adapter is not None:
        if not is_adapter(folder):
            raise ValueError(
                f"{folder} holds whole weights, and this run trains an adapter: resume without use_peft, or begin a "
                "new run with that folder as its model"
            )
        fill(model.adapter, folder)
        return
    is_head = isinstance(model, ValueHead)
    if not is_adapter(folder) and is_head != ValueHead.is_in(folder):
        theirs, ours = ("separate", "shared") if is_head else ("shared", "separate")
        raise ValueError(
            f"{folder} holds a {theirs} critic, and this run trains a {ours} one: resume with critic={theirs}, or "
            "begin a new run with the checkpoint as its model"
        )
    if isinstance(model, ValueHead):
        stored = model.stored_parts(folder)
    elif is_adapter(folder):
        raise ValueError(f"{folder} holds an adapter, and this run trains whole weights: resume with use_peft")
    else:
        stored = load_model(folder, "cpu", model.dtype, model.config.head, tensor=model.tensor).parts()
    parts = model.parts()
    for name in sorted(parts.keys() | stored.keys()):
        ours, theirs = (found[name].shape if name in found else None for found in (parts, stored))
        if ours != theirs:
            raise ValueError(
                f"{folder} holds another model: {name} has shape {theirs or 'none (it is missing)'}, "
                f"this run's has {ours or 'none'}; resume with the model of that run"
            )
    for name, view in parts.items():
        view[...] = model.backend.array(stored[name])
