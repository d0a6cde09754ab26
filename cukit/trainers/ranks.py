"""What a trainer does as one of several ranks; on its own it does none of it.

Every rank runs the same program on the same data, and holds the same weights (tensor_parallel.py: or the same part of
them, and what is said of a rank here holds of the ranks that share a model). What costs time is shared out: prompts
are drawn and rewarded, rows are trained on and evaluated by one rank each; what comes of it is gathered, and everything
that follows from it (advantages, weights of tokens, metrics) is computed by each rank from the whole. So N ranks do
what one rank does with the same batch, but for the order in which sums are added up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ..models.store import PIECES
from ..parallel.config import TensorOptions
from ..parallel.group import Group, RankLost, shares
from ..parallel.world import world
from ..runs.progress import Progress
from ..runs.signals import RunStopped
from .gradient_sums import GradientSums
from .tensor_parallel import divided

T = TypeVar("T")
Sums = dict[str, Any]


class FailedElsewhere(OSError):
    """What one of the ranks that share a model did for all of them has failed; the message says which, and why."""


class Ranks:
    """The ranks of a run. everyone: default: all processes that the launcher started. options: how many of them share a
    model; such ranks do all work of one rank together, and `rank` and `size` count them as one.

    rollout_gpus: the last so many ranks only draw completions, and the others only train (apart.py); 0: each does both.
    """

    draws = trains = True  # what this rank does
    sending: Group | None = None  # the first rank, which sends weights, and those that only draw

    def __init__(self, everyone: Group | None = None, options: TensorOptions | None = None, rollout_gpus: int = 0):
        self.world = world() if everyone is None else everyone
        self.group, self.tensor = divided(self.world, options)
        self.rank, self.size = self.group.rank, self.group.size
        self.several = self.world.size > 1
        self.is_first = self.world.rank == 0  # it writes files and talks to the user
        self.alone = False
        self.training: Ranks = self  # those that train; on a rank that does not, a group of one that has nothing to do
        self.weights_step: int | None = None  # the step whose weights each rank is known to have
        self._drawing = range(self.size)
        if rollout_gpus:
            self._drawing = range(self.size - rollout_gpus, self.size)
            self.draws = self.rank in self._drawing
            self.trains = not self.draws
            self.training = Ranks(self.group.part(range(self._drawing.start)) or Group())
            self.sending = self.group.part([0, *self._drawing])

    # ---- work that is shared out ----

    def each(self, work: Callable[[], T], what: str) -> list[T]:
        """What work() gives on each rank, in their order. Inside, a rank is alone: no collective is called.

        If it raises on any rank, all ranks end: the rank itself with its own error, the others with RankLost, which
        names it; or all with RunStopped where a rank was asked to stop.
        """
        if not self.several:
            return [work()]

        def alone() -> T | None:
            with self.being_alone():
                value = work()
            return value if self.tensor is None or self.tensor.rank == 0 else None  # the same on all of them

        found = _together(self.world, alone, what, RankLost)
        return found[:: self.world.size // self.size]  # type: ignore[return-value]

    def once(self, work: Callable[[], T], what: str) -> T:
        """What work() gives, which calls a user's code: of ranks that share a model the first one alone calls it, and
        all get it.
        """
        if self.tensor is None:
            return work()
        is_first = self.tensor.rank == 0
        found = _together(self.tensor.group, lambda: work() if is_first else None, what, FailedElsewhere)
        return found[0]  # type: ignore[return-value]

    def first(self, work: Callable[[], T], what: str) -> T:
        """What work() gives on the first rank, which alone calls it; on every rank."""
        return self.each(lambda: work() if self.is_first else None, what)[0]  # type: ignore[return-value]

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; alone, this one."""
        if self.alone:  # but for those that share its model
            return flag if self.tensor is None else any(self.tensor.group.gather_values(flag, "stop"))
        return any(self.world.gather_values(flag, "stop")) if self.several else flag

    def drawn_here(self, count: int) -> range:
        """Of so many prompts, the places of those that this rank draws: none if it only trains."""
        if not self.draws:
            return range(0)
        place = self.rank - self._drawing.start
        return range(*shares(count, len(self._drawing))[place : place + 2])

    def is_drawing(self, rank: int) -> bool:
        return rank in self._drawing

    def share(self, lengths: Sequence[int] | np.ndarray) -> tuple[int, int]:
        """(first, last + 1) of the rows of these lengths that are this rank's: a run of about as many tokens each."""
        borders = self.borders(lengths)
        return borders[self.rank], borders[self.rank + 1]

    def borders(self, lengths: Sequence[int] | np.ndarray) -> list[int]:
        """(size + 1) borders of the ranks' rows."""
        lengths = np.asarray(lengths)
        ends = np.cumsum(lengths)
        wanted = (ends[-1] if len(ends) else 0) * np.arange(1, self.size) / self.size
        return [0, *np.searchsorted(ends - lengths / 2, wanted).tolist(), len(lengths)]

    def fill(self, column: Any, borders: Iterable[int], backend: Any) -> None:
        """Complete a column of a device of which each rank has computed its own part."""
        if self.size > 1:
            self.group.on(backend).all_gather(column, [int(border) for border in borders], "columns")

    def barrier(self, what: str) -> None:
        self.world.barrier(what)

    @contextmanager
    def being_alone(self) -> Iterator[None]:
        """Inside, no collective is called."""
        assert not self.alone, "a rank that is alone calls no collective"
        self.alone = True
        try:
            yield
        finally:
            self.alone = False

    # ---- sums and gradients ----

    def add_up(self, work: Callable[[], Sums], what: str) -> Sums:
        """The sums of work() over the ranks; of names max/… the largest."""
        return merged(self.each(work, what))

    def total(
        self,
        work: Callable[[GradientSums | None], tuple[Sums, bool]],
        models: dict[str, Any],
        learning: Collection[str],
        passes: Sequence[Iterable[str]],
        fast: bool,
    ) -> tuple[Sums, bool]:
        """(sums, was there a gradient) of an optimizer batch of which work() does this rank's passes, and tells the
        given GradientSums of them; afterwards every rank holds the sums of the whole batch's gradients, or its shares.

        models: by name. learning: those that the update is of. passes: for each pass of this rank those that it serves.
        """
        if not self.several:
            return work(None)
        if self.size == 1:  # all of them share one model
            alone = self.each(lambda: work(None), "training")
            return merged([sums for sums, _ in alone]), any(has for _, has in alone)
        gradients = GradientSums(self.group, models, learning, passes, fast)

        def joined() -> tuple[Sums, bool, dict]:
            try:
                found = work(gradients)
                gradients.finish()
            except RankLost:
                raise
            except (Exception, RunStopped) as error:
                self._join_after(error, gradients)
                raise
            return *found, gradients.reached()

        try:
            found = self.each(joined, "training")
        finally:
            gradients.end()
        gradients.settle([reached for _, _, reached in found])
        return merged([sums for sums, _, _ in found]), any(has for _, has, _ in found)

    def _join_after(self, error: BaseException, gradients: GradientSums) -> None:
        """Join the sums in which the others wait for this rank. If that fails too, they learn of the end of this one in
        that wait.
        """
        try:
            gradients.finish()
        except Exception:
            text = f"{type(error).__name__}: {error}"[:500]
            raise RankLost(f"rank {self.rank} failed in training: {text}") from error

    # ---- the run ----

    def begin(self, trainer: Any, advice: str) -> None:
        """ValueError in one line unless all ranks are about to do the same with the same weights. advice: the end of
        what is said of a rank that is lost.
        """
        if not self.several:
            return
        self.watch.timeout, self.watch.advice = trainer.args.ddp_timeout, advice
        facts = {name: value for name, value in trainer.run_config().items() if name != "output_dir"}
        facts |= {"device": trainer.model.backend.name, "rows": len(trainer.train_rows)}
        for name, rows in (("train_dataset", trainer.train_rows), ("eval_dataset", trainer.eval_rows)):
            facts[f"rows of {name}, or their order (a checksum)"] = _sum_of_rows(map(trainer.ids_of, rows))
        sums = {f"weights of {name}": _sum_of_weights(one.model) for name, one in trainer.models.items()}
        self.weights_step, groups = trainer.global_step, [self.group]
        if self.training is self:
            self.compare(facts | sums)
        else:
            self.compare(facts | dict([*sums.items()][:1]))  # the policy, which all hold
            self.training.compare(sums)
            groups = [group for group in (self.training.group, self.sending) if group is not None]
        for group in groups:
            if group.size > 1:  # what GPUs need for it is missed here, and not after the first rollout
                group.on(trainer.model.backend)

    def compare(self, facts: dict) -> None:
        """ValueError in one line if a fact differs between ranks."""
        everyone, parts = self.world.gather_values(facts, "start of the run"), self.world.size // self.size
        for rank, other in enumerate(everyone):
            for name, value in everyone[rank % parts].items():
                if other.get(name) != value:
                    raise ValueError(
                        f"the ranks differ in {name}: {value!r} on rank {rank % parts}, {other.get(name)!r} on rank "
                        f"{rank}; give each the same model, data, options and kind of device"
                    )

    def tables(self, own: str) -> str:
        """This rank's plan of memory; where ranks are apart, that of one that trains and of one that draws."""
        if self.training is self:
            return own
        found = self.group.gather_values(own, "plans of memory")
        return f"of a process that trains:\n{found[0]}\nof a process that draws:\n{found[-1]}"

    def busy(self) -> None:
        """Before what keeps all threads of a process waiting: a large file that is read. Until the next collective."""
        if self.several:
            self.watch.busy()

    def progress(self, total_steps: int, label: str, start_step: int) -> Progress:
        """The display of a run: plain lines of the first rank, since mpirun shows each process a terminal, whatever
        there is.
        """
        live = False if self.several else None
        return Progress(total_steps, label, start_step, live, silent=not self.is_first)

    def end(self, error: BaseException | None) -> None:
        """At the end of a run: no rank goes on before the first one has written everything."""
        if self.several:
            self.barrier("end of the run") if error is None else self.watch.end_run(error, self.is_first)

    @property
    def watch(self) -> Any:
        return self.world.watch  # type: ignore[attr-defined]


def _together(group: Group, work: Callable[[], T], what: str, elsewhere: type[OSError]) -> list[T]:
    """What work() gives on each rank of a group. If it raises on any, all raise: the rank its own error, the others
    `elsewhere`; or all RunStopped.
    """
    value, error = None, None
    try:
        value = work()
    except RankLost:
        raise
    except (Exception, RunStopped) as raised:
        error = raised
    state = None if error is None else (isinstance(error, RunStopped), f"{type(error).__name__}: {error}"[:500])
    found = group.gather_values((state, value), what)
    states = [(rank, *state) for rank, (state, _) in enumerate(found) if state is not None]
    failed = [(rank, text) for rank, is_stop, text in states if not is_stop]
    if error is not None and not (failed and isinstance(error, RunStopped)):
        raise error
    if failed:
        rank, text = failed[0]
        raise elsewhere(f"rank {rank} failed in {what}: {text}")
    if states:
        raise RunStopped
    return [value for _, value in found]


def merged(parts: Iterable[Sums]) -> Sums:
    """Sums of several ranks as one: added up in their order; of names max/… the largest."""
    total: Sums = {}
    for part in parts:
        for name, value in part.items():
            combine = np.maximum if name.startswith("max/") else np.add
            total[name] = combine(total[name], value) if name in total else value
    return total


def _sum_of_rows(rows: Iterable[Iterable[ArrayLike]]) -> str:
    """A number that differs where the ids of rows do, or their order."""
    found = hashlib.blake2b(digest_size=8)
    for row in rows:
        for ids in row:
            array = np.asarray(ids, np.int32)
            found.update(array.size.to_bytes(8, "little") + array.tobytes())
    return found.hexdigest()


def _sum_of_weights(model: Any) -> str:
    """A number (every bit of it, NaN too) that differs where weights do."""
    be, store = model.backend, model.trained_store
    return be.sum_in_order(be.sums_of_squares([bucket.data for bucket in store.buckets], PIECES)).hex()
