"""What ranks that share a model tell one another within its passes: functions between the parts of a layer.

Shoeybi et al. 2019, "Megatron-LM": a weight whose rows are shared out takes what every rank holds and gives columns; a
weight whose columns are shared out takes columns and gives a part of a sum. `ranks` is the group of these ranks for the
arrays' device (parallel/group.py). What every rank holds has the same bits on each, and so has its gradient.
"""

from dataclasses import dataclass
from typing import Any

from ..autograd import Parameter, Remade, Tensor, is_recording, record
from ..backend import backend_of
from .embedding import embedding
from .norm import add_rms_norm, sum_add_rms_norm

MOST_PARTS = 1 << 22  # bytes of all ranks' parts up to which each rank gets all of them, and adds them up as it goes on


def add_up(array, ranks, what: str = "sum of a layer"):
    """The array, which is now the sum of the ranks' arrays."""
    ranks.all_reduce(array, what)
    return array


@dataclass(frozen=True)
class Columns:
    """The columns of arrays (T, N) that ranks share out: rank r has borders[r] … borders[r + 1] − 1."""

    ranks: Any
    borders: tuple[int, ...]

    def gather(self, own, what: str = "columns of a layer"):
        """The whole array, of which each rank gives its own columns (T, N_r)."""
        be, (tokens, columns), borders, rank = backend_of(own), own.shape, self.borders, self.ranks.rank
        if all(b - a == columns for a, b in zip(borders, borders[1:])):
            parts = self.ranks.all_parts(own, what)
            if tokens == 1:
                return parts.reshape(1, borders[-1])
            whole = be.empty((tokens, len(parts), columns), own.dtype)
            whole[...] = parts.swapaxes(0, 1)
            return whole.reshape(tokens, borders[-1])
        flat = be.empty((tokens * borders[-1],), own.dtype)
        places = [tokens * border for border in borders]
        flat[places[rank] : places[rank + 1]] = own.reshape(-1)
        self.ranks.all_gather(flat, places, what)
        if tokens == 1:
            return flat.reshape(1, -1)
        whole = be.empty((tokens, borders[-1]), own.dtype)
        for a, b in zip(borders, borders[1:]):
            whole[:, a:b] = flat[tokens * a : tokens * b].reshape(tokens, b - a)
        return whole

    def own(self, whole):
        """This rank's columns, in memory of their own."""
        be, (a, b) = backend_of(whole), self.borders[self.ranks.rank : self.ranks.rank + 2]
        found = be.empty((len(whole), b - a), whole.dtype)
        found[...] = whole[:, a:b]
        return found

    def own_of_sum(self, whole, what: str = "columns of a gradient"):
        """This rank's columns of the sum of the ranks' arrays; each rank has as many."""
        be, tokens, borders, rank = backend_of(whole), len(whole), self.borders, self.ranks.rank
        flat = be.empty((whole.size,), whole.dtype)
        for a, b in zip(borders, borders[1:]):
            flat[tokens * a : tokens * b].reshape(tokens, b - a)[...] = whole[:, a:b]
        self.ranks.reduce_scatter(flat, what)
        a, b = borders[rank : rank + 2]
        return flat[tokens * a : tokens * b].reshape(tokens, b - a)


def copy_to_ranks(x: Tensor, ranks) -> Tensor:
    """y = x, which every rank holds; each multiplies it with its own rows of a weight, so that dx = Σ dy over ranks.

    dy is a product's gradient, and nothing else holds it. Saves nothing: y is remade where x is.
    """
    saved = x.saved
    remade = (saved,) if isinstance(saved, Remade) else ()
    return record(x.data, (x,), lambda dy: (add_up(dy, ranks, "gradient of a layer"),), remade)


def sum_over_ranks(x: Tensor, ranks, what: str = "sum of a layer") -> Tensor:
    """y = Σ x over the ranks, in x's memory; every rank holds y and its whole gradient, so that dx = dy."""
    return record(add_up(x.data, ranks, what), (x,), lambda dy: (dy,))


def add_rms_norm_over_ranks(x: Tensor, residual: Tensor, w: Parameter, eps: float, ranks) -> tuple[Tensor, Tensor]:
    """add_rms_norm of Σ x over the ranks: the step between two blocks.

    Where nothing is recorded, and x is small, each rank gets every rank's x, which takes half of the steps of a sum,
    and one kernel does the rest. The bits are the same.
    """
    if is_recording() or ranks.size * x.data.nbytes > MOST_PARTS:
        return add_rms_norm(sum_over_ranks(x, ranks), residual, w, eps)
    return sum_add_rms_norm(ranks.all_parts(x.data, "sum of a layer"), residual, w, eps)


def gather_columns(x: Tensor, columns: Columns, multiplied: bool = False) -> Tensor:
    """y (T, N) of the ranks' columns x (T, N_r). Every rank holds y; where it also holds y's whole gradient, dx is its
    own columns of dy, and nothing is saved. multiplied: each rank multiplies y with its own rows of a weight, so that
    it holds a part of the gradient, and dx is its columns of Σ dy over the ranks; y is remade from x.
    """
    if not multiplied:
        return record(columns.gather(x.data), (x,), lambda dy: (columns.own(dy),))
    saved = x.saved
    again = Remade(lambda: columns.gather(saved.array()))

    def rule(dy):
        if again.wanted:
            saved.use(lambda own: again.give(columns.gather(own)))
        return (columns.own_of_sum(dy),)

    return record(columns.gather(x.data), (x,), rule, (again,))


def embedding_of_ranks(table: Parameter, ids, first: int, ranks) -> Tensor:
    """The rows of `ids` of a whole table (V, C), of which a rank holds those from `first` on: (T, C) on every rank.

    A row is one rank's, and zeros are added to it.
    """
    return sum_over_ranks(embedding(table, ids, first), ranks, "embedding")
