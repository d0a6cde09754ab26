"""Reverse-mode differentiation: a Tensor remembers how it was made; backward() walks the graph from the youngest node
to the oldest.

An op computes its output with the backend's array functions and calls record(output, inputs, rule), where rule(dy)
returns one gradient array (or None) an input. Weights do not pass gradients through the graph: the rule adds them
straight into Parameter.grad, in float32, so that micro-batches accumulate there without a copy.
"""

from contextlib import contextmanager
from itertools import count

from .backend import backend_of

_recording = True
_age = count()


class Tensor:
    """An array on some device, and its place in the graph. Its operators (+, *, …) are in cukit.ops.elementwise."""

    __slots__ = ("_index", "_node", "data", "grad", "requires_grad")

    def __init__(self, data, requires_grad=False):
        self.data = data
        self.requires_grad = requires_grad
        self.grad = None  # filled by backward() for leaves: tensors that no op made
        self._node, self._index = None, 0

    @property
    def shape(self):
        return self.data.shape

    @property
    def dtype(self):
        return self.data.dtype

    @property
    def backend(self):
        return backend_of(self.data)

    def detach(self):
        """The same array, outside the graph."""
        return Tensor(self.data)

    def item(self) -> float:
        """The only element as a Python float."""
        return float(self.data)

    def backward(self, grad=None):
        """Add grad · d(self)/d(leaf) to the grad of every leaf. grad: array like self (default: 1, for a scalar)."""
        if grad is None:
            if self.data.size != 1:
                raise ValueError(f"backward() of an output of shape {self.shape} needs its gradient")
            grad = self.data * 0 + 1
        backward([self], [grad])

    def __repr__(self):
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"


class Parameter(Tensor):
    """A trained array. grad is None or an array of float32 (float64 for float64 data) that backward passes add to."""

    __slots__ = ("name",)

    def __init__(self, data, name=""):
        super().__init__(data, requires_grad=True)
        self.name = name

    def grad_buffer(self):
        """The array to add gradients into, made of zeros at first use; None if the parameter is frozen (requires_grad
        False).
        """
        if self.requires_grad and self.grad is None:
            self.grad = self.backend.zeros(self.shape, self.backend.accumulator(self.dtype))
        return self.grad if self.requires_grad else None

    def zero_grad(self):
        self.grad = None


class _Node:
    """One op that ran: where its inputs came from, and the rule from output gradients to input gradients."""

    __slots__ = ("age", "inputs", "num_outputs", "rule")

    def __init__(self, inputs, rule, num_outputs):
        self.inputs, self.rule, self.num_outputs, self.age = inputs, rule, num_outputs, next(_age)


def record(data, inputs, rule):
    """The output Tensor of an op (a tuple of Tensors if `data` is a tuple of arrays).

    inputs: Tensors or None. rule(dy, …), one array (or None) an output, returns one gradient (or None) an input; it is
    kept only if the tape is on and an input requires a gradient.
    """
    arrays = data if isinstance(data, tuple) else (data,)
    outputs = tuple(Tensor(array) for array in arrays)
    if _recording and any(x is not None and x.requires_grad for x in inputs):
        node = _Node(inputs, rule, len(outputs))
        for index, out in enumerate(outputs):
            out.requires_grad, out._node, out._index = True, node, index
    return outputs if isinstance(data, tuple) else outputs[0]


@contextmanager
def no_grad():
    """Inside, nothing is recorded."""
    with _tape(False):
        yield


@contextmanager
def _tape(on: bool):
    global _recording
    before, _recording = _recording, on
    try:
        yield
    finally:
        _recording = before


def backward(outputs, grads):
    """Add Σ grad · d(output)/d(leaf) to the grad of every leaf that requires one. Outputs whose gradient is None are
    left out.

    The graph is taken apart on the way, so that activations are freed as soon as they are used: it serves once.
    """
    waiting = {}  # node -> gradient of each of its outputs

    def add(x, dx):
        if x._node is not None:
            slots = waiting.setdefault(x._node, [None] * x._node.num_outputs)
            slots[x._index] = dx if slots[x._index] is None else slots[x._index] + dx
        elif isinstance(x, Parameter):
            buffer = x.grad_buffer()
            buffer += dx
        else:
            x.grad = dx if x.grad is None else x.grad + dx

    for x, dx in zip(outputs, grads, strict=True):
        if not x.requires_grad:
            raise ValueError("backward() needs an output that depends on a parameter (was it computed under no_grad?)")
        if dx is not None:
            add(x, dx)
    # A node is younger than the nodes it was made from, so from young to old every gradient is complete when its turn
    # comes.
    pending = sorted(_reachable(outputs), key=lambda node: node.age)
    while pending:
        node = pending.pop()
        grads_out = waiting.pop(node, None)
        rule, node.rule = node.rule, _used
        if grads_out is not None:
            for x, dx in zip(node.inputs, rule(*grads_out), strict=True):
                if dx is not None and x is not None and x.requires_grad:
                    add(x, dx)
        node.inputs = ()


def _used(*_):
    raise ValueError("backward() ran twice over the same graph: compute the output again")


def _reachable(outputs):
    """Every node that the outputs were made from."""
    found, stack = set(), [x._node for x in outputs if x._node is not None]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(x._node for x in node.inputs if x is not None and x._node is not None)
    return found


def recompute(function, *inputs: Tensor):
    """function(*inputs) -> tuple of Tensors, keeping only its inputs: it runs again in the backward pass.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (gradient checkpointing). Parameters used inside
    get their gradients; an input must require a gradient, and other tensors that the function closes over must not.
    """
    with no_grad():
        outputs = function(*inputs)

    def rule(*grads):
        leaves = [Tensor(x.data, requires_grad=x.requires_grad) for x in inputs]
        with _tape(True):
            again = function(*leaves)
        backward(again, grads)
        return [leaf.grad for leaf in leaves]

    return record(tuple(out.data for out in outputs), inputs, rule)
