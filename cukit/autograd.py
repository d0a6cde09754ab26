"""Reverse-mode differentiation: a Tensor remembers how it was made; backward() walks the graph from the youngest node
to the oldest.

An op computes its output with the backend's array functions and calls record(output, inputs, rule). rule(dy) returns
one gradient array (or None) for each input. A weight's gradient does not pass through the graph: the rule adds it
straight into Parameter.grad, in float32, so that micro-batches accumulate there without a copy.
"""

import threading
from collections import Counter
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from .backend import backend_of

_age = count()


class _Tape(threading.local):
    """Whether ops are recorded, and whether what is cheap to make again is kept, for each thread apart: an engine may
    step in one while another trains.
    """

    on = True
    remakes = False
    when_done = None  # what the next backward pass tells of parameters


_tape = _Tape()


class Tensor:
    """An array on some device, and its place in the graph. Its operators (+, *, …) are in cukit.ops.elementwise."""

    __slots__ = ("_index", "_node", "_saved", "data", "grad", "requires_grad")

    def __init__(self, data, requires_grad=False):
        self.data = data
        self.requires_grad = requires_grad
        self.grad = None  # filled by backward() for leaves: tensors that no op made
        self._node, self._index = None, 0
        self._saved = None  # Remade, if the op that made this gives the array again

    @property
    def shape(self):
        return self.data.shape

    @property
    def dtype(self):
        return self.data.dtype

    @property
    def backend(self):
        return backend_of(self.data)

    @property
    def saved(self) -> "Kept | Remade":
        """What a rule holds on to in order to have this array in the backward pass."""
        return Kept(self.data) if self._saved is None else self._saved

    if TYPE_CHECKING:  # cukit.ops.elementwise gives these, with a Tensor, an array or a number on the other side

        def __add__(self, other: Any) -> "Tensor": ...
        def __radd__(self, other: Any) -> "Tensor": ...
        def __sub__(self, other: Any) -> "Tensor": ...
        def __rsub__(self, other: Any) -> "Tensor": ...
        def __mul__(self, other: Any) -> "Tensor": ...
        def __rmul__(self, other: Any) -> "Tensor": ...
        def __truediv__(self, other: Any) -> "Tensor": ...
        def __rtruediv__(self, other: Any) -> "Tensor": ...
        def __neg__(self) -> "Tensor": ...
        def sum(self) -> "Tensor": ...

    def item(self) -> float:
        """The only element as a Python float."""
        return float(self.data)

    def backward(self, grad=None):
        """Add grad · d(self)/d(leaf) to the grad of every leaf. grad: array like self (default: 1, for a scalar)."""
        if grad is None:
            if self.data.size != 1:
                raise ValueError(f"backward() of an output of shape {self.shape} needs its gradient")
            grad = self.backend.zeros(self.shape, self.dtype) + 1  # not data * 0, which an infinity makes NaN
        backward([self], [grad])

    def __repr__(self):
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"


class Parameter(Tensor):
    """A trained array. grad is None or an array of float32 (float64 for float64 data) that backward passes add to.

    slot: its place in a store of flat buckets (models.store), which then holds its gradient too; None if it stands
    alone. In a store, new weights are written in place (data[...] = values).
    """

    __slots__ = ("_grad", "name", "slot")

    def __init__(self, data, name=""):
        self._grad = self.slot = None
        super().__init__(data, requires_grad=True)
        self.name = name

    @property
    def grad(self):
        return self._grad

    @grad.setter
    def grad(self, value):
        """In a store the gradient stays a view: a value is copied there, and None clears it."""
        if self.slot is None or value is self._grad:
            self._grad = value
        elif value is None:
            self._grad[...] = 0
            self._grad = None
        else:
            self._grad = self.slot.gradient()
            self._grad[...] = value

    def release_grad(self):
        """Forget the gradient; its memory goes with the bucket's."""
        self._grad = None

    def grad_buffer(self):
        """The array to add gradients into, made of zeros at first use; None if the parameter is frozen (requires_grad
        False).
        """
        if self.requires_grad and self._grad is None:
            if self.slot is None:
                self._grad = self.backend.zeros(self.shape, self.backend.accumulator(self.dtype))
            else:
                self._grad = self.slot.gradient()
        return self._grad if self.requires_grad else None

    def zero_grad(self):
        self.grad = None


class Kept:
    """An array that stays in memory until the backward pass."""

    __slots__ = ("_array",)

    def __init__(self, array):
        self._array = array

    def array(self):
        return self._array

    def use(self, function):
        """Call function(array)."""
        function(self._array)


class Remade:
    """An array that is not kept: the op that made it makes it again in the backward pass, from what its rule has.

    array() does so by work of its own. A rule that needs the array only for a weight's gradient says use(function)
    instead: the call waits until the rule of the op that made the array runs, which then says give(array). That rule
    reads anyway what the array is made from. It is older, so its turn comes later; and it comes, because a rule that
    says use() gives the array's gradient.
    """

    __slots__ = ("_make", "_waiting")

    def __init__(self, make):
        self._make, self._waiting = make, []

    def array(self):
        return self._make()

    def use(self, function):
        """Call function(array) as soon as the array is there again."""
        self._waiting.append(function)

    @property
    def wanted(self) -> bool:
        """Whether a call waits."""
        return bool(self._waiting)

    def give(self, array):
        """Make the calls that wait."""
        while self._waiting:
            self._waiting.pop(0)(array)


class _Node:
    """One op that ran: where its inputs came from, and the rule from output gradients to input gradients.

    sources: for each input None (no gradient wanted), a leaf Tensor, or (node, index of its output). Inputs that other
    ops made are not held, so that only what a rule needs outlives the forward pass.
    """

    __slots__ = ("age", "num_outputs", "rule", "sources")

    def __init__(self, inputs, rule, num_outputs):
        self.sources = tuple(map(_source, inputs))
        self.rule, self.num_outputs, self.age = rule, num_outputs, next(_age)


def _source(x):
    if x is None or not x.requires_grad:
        return None
    return x if x._node is None else (x._node, x._index)


def record(data, inputs, rule, remade=()):
    """The output Tensor of an op (a tuple of Tensors if `data` is a tuple of arrays).

    inputs: Tensors or None. rule(dy, …), one array (or None) an output, returns one gradient (or None) an input; it is
    kept only if the tape is on and an input requires a gradient. A rule must not close over a Tensor of which it needs
    no array. remade: a Remade for each output, from the first on, that need not be kept inside remaking(True); the rule
    gives what is wanted of them.
    """
    several = isinstance(data, tuple)
    outputs = tuple(map(Tensor, data)) if several else (Tensor(data),)
    if _tape.on and _some_requires_grad(inputs):
        node = _Node(inputs, rule, len(outputs))
        for index, out in enumerate(outputs):
            out.requires_grad, out._node, out._index = True, node, index
        if _tape.remakes:
            for out, one in zip(outputs, remade):
                out._saved = one
    return outputs if several else outputs[0]


def _some_requires_grad(inputs) -> bool:
    for x in inputs:  # any() of a generator takes three times as long, and every op asks
        if x is not None and x.requires_grad:
            return True
    return False


def on_the_way_back(x: Tensor, function) -> Tensor:
    """x; the backward pass calls function() between what was made of it and what it was made from."""

    def rule(dx):
        function()
        return (dx,)

    return record(x.data, (x,), rule, () if x._saved is None else (x._saved,))


def is_recording() -> bool:
    """Whether this thread's ops are recorded now."""
    return _tape.on


@contextmanager
def no_grad():
    """Inside, this thread records nothing."""
    with _recording(False):
        yield


@contextmanager
def _recording(on: bool):
    before, _tape.on = _tape.on, on
    try:
        yield
    finally:
        _tape.on = before


@contextmanager
def remaking(on: bool):
    """Inside, this thread keeps no outputs of ops that make them again in the backward pass; each op says whether it
    does.
    """
    before, _tape.remakes = _tape.remakes, on
    try:
        yield
    finally:
        _tape.remakes = before


def backward(outputs, grads):
    """Add Σ grad · d(output)/d(leaf) to the grad of every leaf that requires one. An output with gradient None is left
    out.

    The graph is taken apart on the way, so that activations are freed as soon as they are used. So it serves once.
    """
    for x in outputs:
        if not x.requires_grad:
            raise ValueError("backward() needs an output that depends on a parameter (was it computed under no_grad?)")
    _run([(_source(x), dx) for x, dx in zip(outputs, grads, strict=True)])


def _run(starts):
    """backward() of (source, gradient or None) pairs; the outputs' arrays need not live on."""
    waiting = {}  # node -> gradient of each of its outputs

    def add(source, dx):
        if isinstance(source, tuple):
            node, index = source
            slots = waiting.setdefault(node, [None] * node.num_outputs)
            slots[index] = dx if slots[index] is None else slots[index] + dx
        elif isinstance(source, Parameter):
            if (buffer := source.grad_buffer()) is not None:
                buffer += dx
        else:
            source.grad = dx if source.grad is None else source.grad + dx

    for source, dx in starts:
        if dx is not None:
            add(source, dx)
    # A node is younger than the nodes it was made from, so from young to old every gradient is complete when its turn
    # comes.
    pending = sorted(_reachable(waiting), key=lambda node: node.age)
    ran = _telling(pending)
    while pending:
        node = pending.pop()
        grads_out = waiting.pop(node, None)
        rule, node.rule = node.rule, _used
        if grads_out is not None:
            for source, dx in zip(node.sources, rule(*grads_out), strict=True):
                if dx is not None and source is not None:
                    add(source, dx)
        ran(node)
        node.sources = ()


@contextmanager
def when_done(function):
    """Inside, this thread's next backward pass calls function(parameter) after the last rule that names the parameter
    among its inputs. A pass within a rule (recompute) tells nothing of its own.
    """
    _tape.when_done = function
    try:
        yield
    finally:
        _tape.when_done = None


def _telling(nodes):
    """What a backward pass calls for each node that ran."""
    function, _tape.when_done = _tape.when_done, None
    if function is None:
        return lambda node: None
    left = Counter(source for node in nodes for source in node.sources if isinstance(source, Parameter))

    def ran(node):
        for source in node.sources:
            if isinstance(source, Parameter):
                left[source] -= 1
                if not left[source]:
                    function(source)

    return ran


def _used(*_):
    raise ValueError("backward() ran twice over the same graph: compute the output again")


def _reachable(nodes):
    """These nodes and every node that they were made from."""
    found, stack = set(), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(source[0] for source in node.sources if isinstance(source, tuple))
    return found


def recompute(function, parameters, *inputs: Tensor):
    """function(*inputs) -> tuple of Tensors, keeping only its inputs: it runs again in the backward pass.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (gradient checkpointing). parameters: those that
    the function may use; they get their gradients inside the backward pass, and one that is trained is enough for the
    call to be recorded. Other tensors that the function closes over must not require a gradient. Inside remaking(True)
    an input that is remade is not kept either, and the outputs are remade; when the function runs again it keeps all.
    """
    if not _tape.on:
        return function(*inputs)
    with no_grad():
        outputs = tuple(out.data for out in function(*inputs))
    needed, saved = [x.requires_grad for x in inputs], [x.saved for x in inputs]

    def again(recorded: bool):
        with no_grad():
            leaves = [Tensor(one.array(), requires_grad=need) for one, need in zip(saved, needed)]
        with _recording(recorded), remaking(False):
            return leaves, function(*leaves)

    def rule(*grads):
        leaves, made = again(recorded=True)
        for one, out in zip(remade, made):
            one.give(out.data)
        # an output that depends on nothing trained got its gradient only because it shares this node with others
        starts = [(_source(out), dx) for out, dx in zip(made, grads, strict=True) if out.requires_grad]
        del made, out  # the outputs' arrays go when no rule needs them
        _run(starts)
        return [*(leaf.grad for leaf in leaves), *(None for _ in parameters)]

    remade = [Remade(lambda index=index: again(recorded=False)[1][index].data) for index in range(len(outputs))]
    return record(outputs, (*inputs, *parameters), rule, remade)
