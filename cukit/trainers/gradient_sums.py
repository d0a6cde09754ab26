"""What ranks exchange within the passes of an update: sums of gradients, each begun as soon as the backward pass has
left a bucket, and, in ZeRO-3, weights before a layer needs them.

All ranks make the same calls in the same order: round by round; in a round the weights of the forward pass, then, model
by model, the sum of the bucket at first that a backward pass leaves first. A call is made when this rank's pass has
come to it and the calls before it are made. What a rank has no pass for, or no gradient, it joins, with zeros; a rank
that fails joins the calls that are left too, and says so afterwards, where the ranks exchange their results
(Ranks.total). So none waits for another in vain, whatever their passes are. That a parameter got no gradient on any
rank is known then alone: until then its zeros are summed.

Where a rank holds whole gradients (ZeRO-0 and 1), a model has one round, in its last pass. From stage 2 on each pass is
a round: its gradients are scattered, added to the shares, and dropped. How many rounds there are, the ranks agree on
before the passes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..autograd import Parameter
from ..models.store import Bucket, Store
from ..parallel.group import Group
from .in_backward import Leaving
from .sharded_weights import BACKWARD, FORWARD, ShardedWeights

Names = tuple[str, ...]  # of the models that a pass serves
Round = tuple[Names, int]


class InOrder:
    """Calls that are made in the order in which they were added: each once it is due, and those before it are made."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Any, Callable[[], None]]] = deque()
        self._due: set = set()
        self._failed = False

    def add(self, key: Any, call: Callable[[], None], due: bool) -> None:
        """due: it may be made as soon as those before it are."""
        self._calls.append((key, call))
        if due:
            self._due.add(key)

    def due(self, keys: Iterable[Any]) -> None:
        """These keys are due; what can be called now is called."""
        self._due.update(keys)
        while self._calls and self._calls[0][0] in self._due:
            self._call_next()

    def finish(self) -> None:
        """Make all calls that are left."""
        while self._calls:
            self._call_next()

    def _call_next(self) -> None:
        if self._failed:
            raise RuntimeError("a call failed, and what comes after it cannot be made")
        self._failed = True
        self._calls.popleft()[1]()
        self._failed = False


class GradientSums:
    """The exchanges of one update: `with sums.summing():` around each backward pass, end_pass() after each pass,
    finish() after the last one; settle() once all ranks have said what was reached; end() in any case.

    group: of the ranks, for the host. models: name -> TrainedModel. learning: those that the update is of. passes: for
    each pass of this rank the models that it serves; in stage 3 it takes each of them through its layers once. Every
    rank makes one at the same time.
    """

    def __init__(
        self,
        group: Group,
        models: dict[str, Any],
        learning: Collection[str],
        passes: Sequence[Iterable[str]],
        fast: bool = False,
    ):
        learns = {name: one for name, one in models.items() if name in learning}
        self._stores: dict[str, Store] = {name: one.model.trained_store for name, one in learns.items()}
        self._stage = max((getattr(one.optimizer, "stage", 0) for one in models.values()), default=0)
        self._fast, self._reached = fast, {name: set[Parameter]() for name in learns}
        self._groups = {name: group.on(one.model.backend) for name, one in models.items()}
        self._weights: dict[str, ShardedWeights] = {
            name: one.weights for name, one in models.items() if one.weights is not None
        }
        self._in_flight: tuple | None = None  # gradients that are wanted no more, and when their sum is over
        names = [name for name in models if name in self._stores or name in self._weights]
        served = [tuple(name for name in names if name in set(given)) for given in passes]
        self._buckets = {name: _trained_buckets(store) for name, store in self._stores.items()}
        self._left_at = {name: self._complete(name) for name in self._stores if name in self._weights}
        self._pass = 0
        self._rounds, rounds = _last_passes(served, names) if self._stage < 2 else _all_passes(served, names, group)
        self._wanted: set = set()  # weights that this rank's pass asks for
        self._calls = InOrder()
        for one in rounds:
            has_no_pass = not any(one in ended for ended in self._rounds)
            for key, call in self._calls_of(one):
                self._calls.add(key, call, has_no_pass)
        for name, weights in self._weights.items():
            weights.begin_passes(partial(self._need, name))

    def _calls_of(self, one: Round) -> Iterator[tuple[Any, Callable[[], None]]]:
        """The calls of a round, in order, with their keys."""
        sharded = [name for name in one[0] if name in self._weights]
        for name in sharded:
            for place, bucket in enumerate(self._weights[name].order):
                key = one, name, FORWARD, place
                yield key, partial(self._gather, name, bucket, key)
        for name in [*reversed(sharded), *(name for name in one[0] if name not in self._weights)]:
            if name not in self._stores:
                continue
            layers = self._weights[name].layers if name in self._weights else []
            rest = list(self._buckets[name])
            for place in reversed(range(len(layers))):
                key = one, name, BACKWARD, place
                yield key, partial(self._gather, name, layers[place], key)
                for bucket in self._left_at[name][place]:
                    rest.remove(bucket)
                    yield (one, bucket), partial(self._sum, name, bucket)
            for bucket in rest:
                yield (one, bucket), partial(self._sum, name, bucket)

    def _complete(self, name: str) -> list[list[Bucket]]:
        """For each layer what the backward pass has left when it comes to it, and had not when it came to the one
        before: that one's buckets, for the first of the backward pass those after all layers.
        """
        layers, buckets = self._weights[name].layers, self._buckets[name]
        ends = [bucket for bucket in buckets if not bucket.layer.startswith(("layers.", "embed_tokens"))]
        return [*([one for one in buckets if one.layer == layer.layer] for layer in layers[1:]), ends]

    # ---- a pass ----

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Around the backward pass of the pass that comes next."""
        layers: dict[tuple, list[Parameter]] = {}
        for one in self._rounds[self._pass]:
            for name in one[0]:
                if name in self._stores and name not in self._weights:
                    layers |= _by_layer(one, self._buckets[name])
        with Leaving(layers, self._calls.due).telling():
            yield

    def _need(self, name: str, direction: str, place: int) -> None:
        """This rank's pass needs weights: those of `place` now, and the next ones soon. In the backward pass it has
        left what lies before.
        """
        (one,) = self._rounds[self._pass]
        weights = self._weights[name]
        order = weights.order if direction == FORWARD else weights.layers
        following = place + (1 if direction == FORWARD else -1)
        keys: list = [(one, name, direction, at) for at in (place, following) if 0 <= at < len(order)]
        self._wanted.update(keys)
        if direction == BACKWARD:
            keys += [(one, bucket) for bucket in self._left_at[name][place]]
        self._calls.due(keys)
        if not weights.holds(order[place]):
            raise ValueError(
                f"zero_stage=3 takes a model through its layers once in a pass of training, and this one does so again "
                f"({name}, {direction} {place}); take zero_stage=2"
            )
        weights.use(order[place])

    def _gather(self, name: str, bucket: Bucket, key: Any) -> None:
        self._weights[name].gather(bucket)
        if key not in self._wanted:  # for the other ranks
            self._weights[name].release(bucket)

    def end_pass(self) -> None:
        """After a pass, also of one without a gradient."""
        for weights in self._weights.values():
            weights.release_all()
        self._wanted.clear()
        rounds = self._rounds[self._pass]
        self._pass += 1
        self._calls.due([key for one in rounds for key, _ in self._calls_of(one)])

    def finish(self) -> None:
        """Join all calls that are left."""
        self._wanted.clear()
        self._calls.finish()

    def _sum(self, name: str, bucket: Bucket) -> None:
        group = self._groups[name]
        self._reached[name].update(slot.parameter for slot in bucket.slots if slot.parameter.grad is not None)
        gradient = bucket.grad_buffer()
        self._drop_in_flight()
        with group.beside():
            if self._stage == 0:
                group.all_reduce(gradient, "gradients", self._fast)
                return
            share = group.reduce_scatter(gradient, "gradients")
            if self._stage >= 2 and bucket.share is None:
                bucket.share = share.copy()
            elif self._stage >= 2:
                bucket.share += share
        if self._stage >= 2:
            self._in_flight = gradient, group, group.moment()
            bucket.free_buffer()

    def _drop_in_flight(self) -> None:
        """The gradients that the last sum has read: what takes their memory comes after it."""
        if self._in_flight is not None:
            _, group, moment = self._in_flight
            group.join(moment)
            self._in_flight = None

    # ---- all passes are over ----

    def reached(self) -> dict[str, list[bool]]:
        """For each parameter of a model whether this rank has a gradient of it."""
        return {
            name: [parameter in self._reached[name] for parameter in store.parameters]
            for name, store in self._stores.items()
        }

    def settle(self, found: Sequence[dict[str, list[bool]]]) -> None:
        """Every rank holds the sums. found: what reached() gave on each: what no rank reached has no gradient."""
        self.join()
        for name, store in self._stores.items():
            for parameter, *flags in zip(store.parameters, *(one[name] for one in found), strict=True):
                if not any(flags):
                    continue
                if self._stage >= 2:
                    parameter.slot.is_summed = True
                else:
                    parameter.grad_buffer()
            for bucket in store.buckets:
                if not any(slot.has_gradient for slot in bucket.slots):
                    bucket.free_grad()

    def end(self) -> None:
        self.join()
        for weights in self._weights.values():
            weights.end_passes()

    def join(self) -> None:
        """What a device is told from now on comes after what has been begun."""
        for group in self._groups.values():
            group.join()
        self._in_flight = None


def _trained_buckets(store: Store) -> list[Bucket]:
    """In the order in which a backward pass leaves them."""
    return [bucket for bucket in reversed(store.buckets) if any(slot.parameter.requires_grad for slot in bucket.slots)]


def _by_layer(one: Round, buckets: list[Bucket]) -> dict[tuple, list[Parameter]]:
    """Keys of the sums of a layer -> what is trained of it."""
    layers: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        layers.setdefault(bucket.layer, []).append(bucket)
    return {
        tuple((one, bucket) for bucket in found): [
            slot.parameter for bucket in found for slot in bucket.slots if slot.parameter.requires_grad
        ]
        for found in layers.values()
    }


def _last_passes(served: Sequence[Names], models: list[str]) -> tuple[list[list[Round]], list[Round]]:
    """(rounds that each pass of this rank ends, all rounds): one a model, which its last pass ends."""
    last = {name: place for place, names in enumerate(served) for name in names}
    own = [[((name,), 0) for name in names if last[name] == place] for place, names in enumerate(served)]
    return own, [((name,), 0) for name in models]


def _all_passes(served: Sequence[Names], models: list[str], group: Group) -> tuple[list[list[Round]], list[Round]]:
    """The same where each pass ends a round: as many as any rank has passes of a kind; kinds in the order of the
    models, in which every rank makes its passes.
    """
    seen: Counter[Names] = Counter()
    own: list[list[Round]] = []
    for names in served:
        own.append([(names, seen[names])] if names else [])
        seen[names] += 1
    counts = group.gather_values(dict(seen), "passes")
    kinds = {names for one in counts for names in one if names}
    in_order = sorted(kinds, key=lambda names: [models.index(name) for name in names])
    return own, [(names, number) for names in in_order for number in range(max(one.get(names, 0) for one in counts))]
