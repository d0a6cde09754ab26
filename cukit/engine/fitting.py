"""Which options would make a run fit: each of a list alone, and the first combination of them that fits.

A plan is asked of a function of the changed options, so that nothing here knows what a run is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..options import Options, changed
from .memory import DoesNotFit, Plan, gigabytes

Row = dict[str, Any]  # options that are tried together
# The cheapest first: what only splits the work, what costs time, what changes the update, LoRA.
# Of one option, what stands further down takes less.
TRAINING: list[Row] = [
    {"max_tokens_per_batch": 8192},
    {"max_tokens_per_batch": 4096},
    {"max_num_seqs": 128},
    {"gradient_checkpointing": "selective"},
    {"gradient_checkpointing": "full"},
    {"quantization": None},  # its copies in 8 bits lie beside the weights
    {"offload_optimizer": True},
    {"optimizer_state": "bfloat16"},
    {"optimizer_state": "int8"},
    {"optimizer_in_bwd": True, "max_grad_norm": 0.0},
    {"use_peft": True, "lora_target_modules": ["all-linear"]},
    {"lora_base_on_host": True},
]
# The same for several processes, which can share out what each of them would hold.
TRAINING_TOGETHER: list[Row] = [{"zero_stage": 1}, {"zero_stage": 2}, *TRAINING[:5], {"zero_stage": 3}, *TRAINING[5:]]
RISING = ("zero_stage",)  # numbers of which the larger takes less
KEPT = {"gradient_checkpointing": "auto", "exact": "true"}  # auto has tried the levels; what was demanded stays
GENERATION: list[Row] = [
    {"max_num_batched_tokens": 2048},
    {"max_num_seqs": 64},
    {"max_num_seqs": 16},
    {"max_model_len": 8192},
    {"max_model_len": 2048},
    {"quantization": None},
    {"exact": "false"},
]


@dataclass(frozen=True)
class Tried:
    """Options, and what a run with them needs at the least: bytes without a KV cache and gaps in the pool; and the
    bytes of the cache that finds room.
    """

    options: Row
    fits: bool
    needs: int
    cache: int
    tight: bool = False  # it fits only with smaller gaps than are reckoned with
    lacks_cache: bool = False  # all but the KV cache that the options ask for would fit

    @property
    def surely_fits(self) -> bool:
        return self.fits and not self.tight

    def words(self) -> str:
        """As on a command line."""
        return " ".join(f"--{name} {_word(value)}" for name, value in self.options.items()) or "as given"

    def outcome(self) -> str:
        """What the table says behind the words."""
        if self.fits:
            return ": only with smaller gaps" if self.tight else ""
        return ": does not fit with its KV cache" if self.lacks_cache else ": does not fit"


@dataclass(frozen=True)
class Search:
    """What was tried alone, the options as given first, and what was found."""

    alone: list[Tried]
    found: Tried | None

    def table(self) -> str:
        """A line a try, then what was found."""
        lines = [f"{'needs':>10}{'KV cache':>12}  options, the cheapest first (needs: at least, without a KV cache)"]
        for one in [*self.alone, *([self.found] if self.found and self.found not in self.alone else [])]:
            cache = gigabytes(one.cache) if one.fits and one.cache else "–"
            lines.append(f"{gigabytes(one.needs):>10}{cache:>12}  {one.words()}{one.outcome()}")
        return "\n".join([*lines, self.line()])

    def line(self) -> str:
        if self.found is None:
            return "neither these options nor all of them together make it fit"
        where = f"with {self.found.words()}" if self.found.options else "as it is"
        return f"it fits {where}{', but only with smaller gaps in the pool' if self.found.tight else ''}"


def search(args: Options, plan_of: Callable[[Any], Plan], rows: list[Row]) -> Search:
    """Try the rows that take less than args do, one by one, then the first combination: rows are added from the first
    on until a plan fits, and those are left out again that it does without, the dearest first. One that fits only with
    smaller gaps counts where no other does.
    """
    rows = [row for row in rows if _takes_less(args, row, rows)]
    alone = [_tried(args, plan_of, row) for row in [{}, *rows]]
    found = _first(args, plan_of, rows, alone[0], lambda one: one.surely_fits)
    found = found or _first(args, plan_of, rows, alone[0], lambda one: one.fits)
    return Search([one for one in alone if one is not None], found)


def _first(
    args: Options, plan_of: Callable[[Any], Plan], rows: list[Row], given: Tried | None, good: Callable[[Tried], bool]
) -> Tried | None:
    found, chosen = given, []
    for row in rows:
        if found is not None and good(found):
            break
        together = _tried(args, plan_of, _together([*chosen, row]))
        if together is not None:  # None: it does not go with the rows before
            found, chosen = together, [*chosen, row]
    if found is None or not good(found):
        return None
    while fewer := _without_one(args, plan_of, chosen, good):
        found, chosen = fewer
    return found


def _without_one(
    args: Options, plan_of: Callable[[Any], Plan], chosen: list[Row], good: Callable[[Tried], bool]
) -> tuple[Tried, list[Row]] | None:
    """The rows but for the dearest that is not needed; None if all are."""
    for row in reversed(chosen if len(chosen) > 1 else []):
        fewer = [one for one in chosen if one is not row]
        tried = _tried(args, plan_of, _together(fewer))
        if tried is not None and good(tried):
            return tried, fewer
    return None


def _takes_less(args: Options, row: Row, rows: list[Row]) -> bool:
    """Whether a row changes its first option towards less: a smaller number (of RISING a larger one), another switch, a
    word further down, None in place of anything.
    """
    name, value = next(iter(row.items()))
    if not row.keys() <= type(args).options().keys():
        return False
    now, values = getattr(args, name), [one[name] for one in rows if name in one]
    if KEPT.get(name) == now:
        return False
    if value is None:
        return now is not None
    if isinstance(value, bool):
        return now != value
    if isinstance(value, int):
        return now is None or (now < value if name in RISING else value < now)
    return now not in values or values.index(now) < values.index(value)


def _together(rows: list[Row]) -> Row:
    return {name: value for row in rows for name, value in row.items()}


def _tried(args: Options, plan_of: Callable[[Any], Plan], options: Row) -> Tried | None:
    """None for options that are refused."""
    try:
        fits, plan = True, plan_of(changed(args, **options) if options else args)
    except DoesNotFit as error:
        fits, plan = False, error.plan
    except ValueError:
        return None
    needs = replace(plan, kv_bytes=0).least_bytes
    return Tried(options, fits, needs, plan.kv_bytes, plan.is_tight, lacks_cache=not fits and needs <= plan.limit)


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
