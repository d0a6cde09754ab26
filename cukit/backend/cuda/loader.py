"""kernels/*.cu as callables: load("norm", x.dtype).rms_norm_forward(grid, block, *args, shared=0).

A module is compiled at its first use, or found in the cache (compile.py), for the card that is current then; a process
drives one card. CUKIT_LOG=1 writes each launch to stderr before it happens. CUKIT_CHECK=1 waits after each launch, so
that an error names its kernel.
"""

import ctypes
import logging
import os
import re
import struct
import sys
from operator import index

import cupy as cp
import numpy as np
from cupy_backends.cuda.api import driver
from cupy_backends.cuda.libs import nvrtc

from . import compile as compiler
from .constants import source_constant

logger = logging.getLogger(__name__)
LOG = os.environ.get("CUKIT_LOG") == "1"
CHECK = os.environ.get("CUKIT_CHECK") == "1"

C_TYPES = {
    "float": "float32",
    "double": "float64",
    "__nv_bfloat16": "bfloat16",
    "__half": "float16",
    "bool": "bool",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "int": "int32",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "long long": "int64",
    "unsigned long long": "uint64",
}
SHARED_LIMIT = 48 * 1024  # static and dynamic together; a kernel must be told before it may take more
INVALID_CONTEXT = 201
ARGUMENT_BYTES = 1024  # room for the arguments of any kernel here

_modules: dict[tuple, "Module"] = {}


def load(family: str, dtype=None, **defines) -> "Module":
    """The kernels of kernels/{family}.cu as attributes, for SCALAR = dtype and the other defines. ValueError if the
    file has no such variant.
    """
    key = (family, dtype, *defines.items()) if defines else (family, dtype)
    module = _modules.get(key)
    if module is None:
        module = _modules[key] = Module(family, dtype, defines)
    return module


class Module:
    """One specialisation of one .cu file; a kernel is fetched when it is first named."""

    def __init__(self, family, dtype, defines):
        self._family = family
        self._defines = _checked_defines(family, dtype, defines)
        self._types = {name: value for name, value in self._defines.items() if name != "SCALAR"}
        if dtype is not None:
            self._types["SCALAR"] = compiler.SCALAR_TYPES[self._defines["SCALAR"]]
        self._raw = None
        self._constants = {}

    def __getattr__(self, name):
        signatures = parse_signatures(compiler.source(self._family))
        if name not in signatures:
            raise AttributeError(f"kernels/{self._family}.cu has no kernel {name!r}: it has {', '.join(signatures)}")
        kernel = Kernel(f"{self._family}.{name}", self._compiled().get_function(name), signatures[name], self._types)
        setattr(self, name, kernel)  # the next look-up does not come here
        return kernel

    def source_constant(self, name: str) -> int:
        """What the source fixes for this variant by `constexpr int NAME = …`; asks neither compiler nor card."""
        return source_constant(self._family, name, **self._defines)

    def constants(self, name: str, count: int) -> list[int]:
        """The values of `extern "C" __constant__ int name[count]` in the compiled code: what the source fixes for this
        variant and card by more than integer arithmetic.

        The first call waits for the card, so it cannot be made while a graph is captured.
        """
        if name not in self._constants:
            self._constants[name] = cp.ndarray((count,), np.int32, self._compiled().get_global(name)).get().tolist()
        return self._constants[name]

    def _compiled(self):
        if self._raw is None:
            self._raw = self._compile()
        return self._raw

    def _compile(self):
        arch = _architecture()
        path = compiler.cache_path(self._family, arch, self._defines)
        if not path.exists():
            words = " ".join([str(value) for value in self._defines.values()])
            logger.info("compiling %s.cu for %s, once for this machine …", self._family, words or arch)
            path = compiler.store(path, compiler.compile_family(self._family, arch, self._defines).cubin)
        return cp.RawModule(path=str(path))


def _checked_defines(family, dtype, defines):
    """{define: text} of a declared variant, or of one that differs from it only in sizes that the file leaves open."""
    chosen = {name: str(value) for name, value in defines.items()}
    if dtype is not None:
        scalar = compiler.SCALAR_OF_DTYPE.get(np.dtype(dtype).name)
        if scalar is None:
            raise ValueError(
                f"{family} has no {np.dtype(dtype).name} kernel: use bfloat16, float16 or float32, or the cpu device"
            )
        chosen["SCALAR"] = scalar
    declared = compiler.specialisations(family)
    free = compiler.open_sizes(family)
    if not any(
        chosen.keys() == variant.keys() and all(name in free or chosen[name] == variant[name] for name in chosen)
        for variant in declared
    ):
        raise ValueError(f"kernels/{family}.cu is not built for {chosen}: its variants are {declared}")
    return chosen


_arch = None


def _architecture() -> str:
    global _arch
    if _arch is None:
        capability = int(cp.cuda.Device().compute_capability)  # "90", "120"
        _arch = compiler.architecture_for(capability // 10, capability % 10, nvrtc.getSupportedArchs())
    return _arch


class Kernel:
    """A compiled kernel that knows its parameters.

    Called as kernel(grid, block, *args, shared=0), on CuPy's current stream: grid and block are an int or a tuple;
    arguments are arrays of the declared type (C-contiguous), None (a null pointer) and Python numbers, which become the
    declared type. shared: bytes of dynamic shared memory. An empty grid launches nothing.
    """

    def __init__(self, name, raw, parameters, types):
        self.name = name
        self.raw = raw  # cupy.RawKernel: attributes such as num_regs
        self.parameters = parameters
        self._function = raw.kernel.ptr
        self._types = [_number_type(name, parameter, types) for parameter in parameters]
        self._arrays = [
            (place, _array_type(name, parameter, types))
            for place, parameter in enumerate(parameters)
            if parameter.pointer
        ]
        layout = struct.Struct("Q" + "".join("Q" if dtype is None else dtype.char for dtype in self._types))
        self._pack, self._size = layout.pack_into, layout.size - 8
        self._shared_limit = SHARED_LIMIT - raw.shared_size_bytes

    def __call__(self, grid, block, *args, shared=0):
        if len(args) != len(self.parameters):
            raise TypeError(
                f"{self.name} takes {len(self.parameters)} arguments "
                f"({', '.join(str(p) for p in self.parameters)}), got {len(args)}"
            )
        x, y, z = (*grid, 1, 1)[:3] if type(grid) is tuple else (grid, 1, 1)
        if not (x and y and z):
            return  # nothing to do, which the driver would refuse
        values = list(args)
        for place, dtype in self._arrays:
            value = values[place]
            if value is None:
                values[place] = 0
            elif type(value) is cp.ndarray and value._c_contiguous and (dtype is None or value.dtype is dtype):
                values[place] = value.data.ptr
            else:
                values[place] = self._address(place, value, dtype)
        if shared > self._shared_limit:
            self.raw.max_dynamic_shared_size_bytes = shared
            self._shared_limit = shared
        if LOG:
            print(
                f"{self.name} grid {grid} block {block} shared {shared}: {self._describe(args)}",
                file=sys.stderr,
                flush=True,
            )
        try:  # not "if _unused": another thread may take the last one in between
            memory = _unused.pop()
        except IndexError:
            memory = _ArgumentMemory()
        try:
            self._pack(memory.buffer, 0, self._size, *values)
        except struct.error:
            self._refuse(args)
            raise
        block = (*block, 1, 1)[:3] if type(block) is tuple else (block, 1, 1)
        launch = self._function, x, y, z, *block, shared, cp.cuda.get_current_stream().ptr, 0, memory.extra
        try:
            driver.launchKernel(*launch)
        except driver.CUDADriverError as error:
            if error.status != INVALID_CONTEXT:
                raise
            cp.cuda.runtime.free(0)  # the first call of a thread: it gets the device's context
            driver.launchKernel(*launch)
        _unused.append(memory)
        if CHECK:
            self._wait()

    def _address(self, place, value, dtype):
        what = f"{self.name}: argument {self.parameters[place]}"
        if type(value) is not cp.ndarray:
            raise TypeError(f"{what} wants a cupy array or None, got {type(value).__name__}")
        if dtype is not None and value.dtype != dtype:
            raise TypeError(f"{what} wants {dtype}, got {value.dtype} of shape {value.shape}")
        if not value._c_contiguous:
            raise ValueError(
                f"{what} must be C-contiguous, got shape {value.shape} with strides {value.strides}: copy it first"
            )
        return value.data.ptr

    def _refuse(self, args):
        """What NumPy says of a number that does not fit its type."""
        for dtype, value in zip(self._types, args, strict=True):
            if dtype is not None:
                dtype.type(value if dtype.kind == "f" else index(value))

    def _describe(self, args):
        return ", ".join(
            f"{p.name} {list(x.shape)} {x.dtype}" if isinstance(x, cp.ndarray) else f"{p.name} {x}"
            for p, x in zip(self.parameters, args)
        )

    def _wait(self):
        stream = cp.cuda.get_current_stream()
        if stream.is_capturing():
            return
        try:
            stream.synchronize()
        except Exception as error:
            raise RuntimeError(f"{self.name} failed: {error}") from error


class _ArgumentMemory:
    """From where the driver copies the arguments of a launch: their number of bytes, then the arguments as a C compiler
    lays them out.
    """

    def __init__(self):
        self.buffer = ctypes.create_string_buffer(ARGUMENT_BYTES)
        start = ctypes.addressof(self.buffer)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
        self._extra = (ctypes.c_void_p * 5)(1, start + 8, 2, start, 0)
        self.extra = ctypes.addressof(self._extra)


_unused: list[_ArgumentMemory] = []  # not one for all: threads launch side by side


# ---- signatures ----


class Parameter:
    """One parameter of a kernel: its C type without const and *, whether it is a pointer, its name."""

    __slots__ = ("ctype", "name", "pointer")

    def __init__(self, ctype, pointer, name):
        self.ctype, self.pointer, self.name = ctype, pointer, name

    def __str__(self):
        return f"{self.ctype}{'*' if self.pointer else ''} {self.name}"


def parse_signatures(text: str) -> dict[str, list[Parameter]]:
    """Kernel name -> parameters, for every extern "C" __global__ function of a CUDA source."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)
    found = {}
    for head in re.finditer(r'extern\s+"C"\s+__global__\s+', text):
        position = head.end()
        while bounds := re.compile(r"(void|__launch_bounds__|__cluster_dims__)\s*").match(text, position):
            position = bounds.end()
            if bounds.group(1) != "void":
                position = _closing(text, position) + 1
                position += len(text[position:]) - len(text[position:].lstrip())
        name = re.compile(r"(\w+)\s*\(").match(text, position)
        if name is None:
            raise ValueError(f"cannot read the kernel at {text[head.start() : head.start() + 100]!r}")
        inside = text[name.end() : _closing(text, name.end() - 1)]
        found[name.group(1)] = [_parse_parameter(part) for part in inside.split(",") if part.strip()]
    return found


def _closing(text, opening):
    """Where the parenthesis that opens at `opening` closes."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    raise ValueError("unbalanced parentheses in a kernel source")


def _parse_parameter(text):
    words = re.sub(r"\b(const|__restrict__|__grid_constant__)\b", " ", text)
    match = re.fullmatch(r"\s*([\w\s]+?)\s*(\*?)\s*(\w+)\s*", words)
    if match is None:
        raise ValueError(f"cannot read the kernel parameter {text.strip()!r}")
    return Parameter(" ".join(match.group(1).split()), bool(match.group(2)), match.group(3))


def _number_type(kernel, parameter, types):
    """The dtype that a number becomes, None for a pointer."""
    if parameter.pointer:
        return None
    ctype = types.get(parameter.ctype, parameter.ctype)
    if ctype not in C_TYPES or ctype.startswith("__"):
        raise TypeError(
            f"{kernel}: parameter {parameter} has a type that the loader does not know: {', '.join(C_TYPES)}"
        )
    return np.dtype(C_TYPES[ctype])


def _array_type(kernel, parameter, types):
    """The dtype of the array that a pointer wants, None for void*."""
    ctype = types.get(parameter.ctype, parameter.ctype)
    return None if ctype == "void" else _dtype(C_TYPES.get(ctype), kernel, parameter)


def _dtype(name, kernel, parameter):
    if name is None:
        raise TypeError(
            f"{kernel}: parameter {parameter} has a type that the loader does not know: void, {', '.join(C_TYPES)}"
        )
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
