"""Random inputs of a head's loss on either device, and what one run of it gives."""

import numpy as np

from cukit import ops
from cukit.autograd import Parameter, Tensor
from cukit.backend import backend_for

DTYPES = ["float32", "bfloat16", "float16", "float64"]
ROWS, WIDTH, VOCABULARY = 23, 8, 41


class Case:
    """Hidden states, a weight, targets and columns of the tokens, the same numbers on both devices."""

    def __init__(self, seed, dtype, rows=ROWS, width=WIDTH, vocabulary=VOCABULARY, device="cpu"):
        rng = self.rng = np.random.default_rng([seed, rows])
        self.backend, self.rows = backend_for(device), rows
        self.dtype, self.precise = self.backend.dtype_of(dtype), self.backend.accumulator(self.backend.dtype_of(dtype))
        self.hidden = self.array(3.2 / width * rng.normal(size=(rows, width)), self.dtype)
        self.weight = self.array(rng.normal(size=(vocabulary, width)), self.dtype)
        self.before = self.array(rng.normal(size=(vocabulary, width)))  # gradient of other passes
        self.targets = self.backend.array(rng.integers(0, vocabulary - 3, rows).astype(np.int32))

    def array(self, values, dtype=None):
        return self.backend.array(np.asarray(values).astype(dtype or self.precise))

    def column(self, around=0.0, size=1.0, power=1):
        return self.array((around + size * self.rng.normal(size=self.rows)) ** power)

    def weights(self):
        """Of the tokens; some take no part."""
        weights = self.rng.normal(size=self.rows) ** 2 / self.rows
        weights[self.rng.random(self.rows) < 0.2] = 0
        return self.array(weights)

    def run(self, loss_of, scale, one_pass, values=None, frozen=False, **settings):
        """Everything that a run gives, as host arrays by name. values: a critic's weight; then loss_of takes its values
        first and returns a loss_of.
        """
        hidden, weight = Tensor(self.hidden.copy(), requires_grad=True), Parameter(self.weight.copy())
        weight.requires_grad = not frozen
        if not frozen:
            weight.grad = self.before.copy()
        every = self.backend.array(np.arange(self.rows, dtype=np.int32))
        states, leaf = ops.index_rows(hidden, every), None  # made by an op, as a decoder's are
        upstream = self.array(scale)
        if values is not None:
            leaf = Parameter(values.copy())
            loss_of = loss_of(ops.score(states, leaf))
        given = (states, weight, self.targets, loss_of, upstream if one_pass else None)
        loss, more, logprobs, entropy = ops.lm_head_loss(*given, **settings)
        loss.backward(upstream)
        found = {"loss": loss.data, "logprobs": logprobs, "entropy": entropy, "dhidden": hidden.grad}
        found |= {"stats": more, "dweight": weight.grad, "dvalues": None if leaf is None else leaf.grad}
        found = {name: None if x is None else np.array(self.backend.to_numpy(x)) for name, x in found.items()}
        assert np.isfinite(found["dhidden"].astype(np.float64)).all()
        return found


def part_of(column, rows):
    return column if column is None or rows is None else column[rows]


def random_policy_loss(case):
    """(loss_of, settings) of random options that keep a token's term its own."""

    def pick(*choices):
        return choices[case.rng.integers(len(choices))]

    kind, beta, entropy_coef = pick("clip", "cispo", "sapo"), pick(0.0, 0.3), pick(0.0, 0.05)
    settings = dict(kind=kind, eps_low=pick(0.05, 0.2), eps_high=pick(0.1, 0.3), delta=pick(None, 1.2), beta=beta)
    settings |= dict(kl_estimator=pick("k1", "k2", "k3"), bias_kl=pick(False, True), level="token")
    settings |= dict(coefficients=(1.0, 1.05) if kind == "sapo" else ())
    columns = [case.column(-3.7), case.column(-3.7), case.column(), case.column(-3.7), case.weights()]
    columns.append(pick(None, case.column(power=2)))

    def loss_of(logprobs, entropy, rows):
        old, ref, advantages, sampled, weights, factors = (part_of(column, rows) for column in columns)
        loss, stats = ops.policy_loss(
            logprobs, old, ref if beta else None, advantages, weights, factors=factors, sampled=sampled, **settings
        )
        if entropy_coef:
            chosen = entropy if factors is None else entropy * factors
            loss = loss - chosen.sum() * entropy_coef
        return loss, stats

    return loss_of, settings | {"entropy_coef": entropy_coef, "with_factors": columns[-1] is not None}


def cross_entropy(case):
    weights = case.weights()
    return lambda logprobs, entropy, rows: (-(logprobs * part_of(weights, rows)).sum(), None)


def random_ppo_loss(case, seed):
    """values -> loss_of, for a critic on the same hidden states."""
    columns = [case.column(-3.7), case.column(), case.column(-3.7), case.column(), case.column(), case.weights()]
    settings = dict(eps_low=0.2, eps_high=0.3, vf_coef=0.1, cliprange_value=[0.2, None][seed % 2])
    settings |= dict(
        dual_clip=[None, 1.5][seed % 2], entropy_coef=[0.0, 0.01][seed // 2 % 2], beta=[0.0, 0.2][seed % 2]
    )

    def with_values(values):
        def loss_of(logprobs, entropy, rows):
            own = values if rows is None else Tensor(values.data[rows])
            return ops.ppo_loss(logprobs, own, entropy, *(part_of(x, rows) for x in columns), **settings)

        return loss_of

    return with_values


def assert_same_bits(first, second, what):
    assert first.keys() == second.keys()
    for name, x in first.items():
        y = second[name]
        same = x is y if x is None or y is None else (x.dtype, x.tobytes()) == (y.dtype, y.tobytes())
        assert same, f"{name}: {what}"


def scale_for(dtype):
    return 2.0**10 if dtype == "float16" else 1.0
