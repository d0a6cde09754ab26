"""Compiles kernels/*.cu to machine code with NVRTC, with or without a GPU, and reports what the compiler says of each
kernel.

A family is one .cu file. Its header says which specialisations it has and for which cards it is written:

    // specialise: SCALAR=bf16,f16,f32 HEAD_DIM=64,128,…
    // arch: sm_80 sm_89 sm_90a sm_100 sm_120

Several `specialise` lines add up; one with nothing after the colon is a specialisation without defines. "…" says that
other sizes are built at first use; the source asserts its limits.
"""

import functools
import hashlib
import importlib.util
import itertools
import logging
import os
import re
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)
SCALAR_TYPES = {"bf16": "__nv_bfloat16", "f16": "__half", "f32": "float"}
SCALAR_OF_DTYPE = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

# -fmad=false: a product and a sum round as they are written, so that one expression has the same bits in every kernel
# and in NumPy; where one rounding is wanted (inner products), write fmaf. Division and square root are IEEE: no
# fast-math. -ftz=true: subnormal floats count as zero, which saves exp2f two instructions and is below everything a
# model can tell apart.
OPTIONS = (
    "-std=c++17",
    "--fmad=false",
    "--ftz=true",
    "--generate-line-info",
    "--ptxas-options=-v",
    "--device-as-default-execution-space",
)


class Compiled(NamedTuple):
    """One specialisation: family, arch, defines ({"SCALAR": "bf16", …}), machine code, NVRTC's log, seconds."""

    family: str
    arch: str
    defines: dict
    cubin: bytes
    log: str
    seconds: float


def kernels_folder() -> Path:
    """Where the sources are: cukit/kernels in an installed package, ../kernels in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "common.cuh").exists():
            return folder
    raise FileNotFoundError(
        f"no kernel sources in {package / 'kernels'} or {package.parent / 'kernels'}: the installation is "
        f"damaged, install again"
    )


def families() -> list[str]:
    return sorted(path.stem for path in kernels_folder().glob("*.cu"))


@functools.cache
def source(family: str) -> str:
    path = kernels_folder() / f"{family}.cu"
    if not path.exists():
        raise ValueError(f"no kernel family {family!r}: there are {', '.join(families())}")
    return path.read_text(encoding="utf-8")


@functools.cache
def source_digest() -> str:
    """Changes with every edit in kernels/, headers included."""
    digest = hashlib.sha256()
    for path in sorted(kernels_folder().glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def specialisations(family: str) -> list[dict]:
    """Every {define: value} the family's header declares."""
    found = []
    lines = re.findall(r"^// specialise:(.*)$", source(family), re.M)
    if not lines:
        raise ValueError(
            f"kernels/{family}.cu declares no specialisation: its header needs a line '// specialise: "
            f"SCALAR=bf16,f16,f32'"
        )
    for line in lines:
        choices = [item.split("=") for item in line.split()]
        names = [name for name, _ in choices]
        found += [dict(zip(names, values)) for values in itertools.product(*(_listed(values) for _, values in choices))]
    return found


def open_sizes(family: str) -> set[str]:
    """The defines that may take sizes beside the declared ones."""
    return set(re.findall(r"(\w+)=[^\s]*,…", source(family)))


def _listed(values: str) -> list[str]:
    return [value for value in values.split(",") if value != "…"]


def architectures(family: str) -> list[str]:
    """The cards the family is written for: its // arch: line."""
    line = re.search(r"^// arch:(.*)$", source(family), re.M)
    if line is None:
        raise ValueError(
            f"kernels/{family}.cu declares no architecture: its header needs a line '// arch: sm_80 sm_90a …'"
        )
    return line.group(1).split()


def architecture_for(major: int, minor: int, supported) -> str:
    """The -arch for a card of compute capability major.minor. supported: what NVRTC knows, as integers (90, 120, …).

    A cubin runs on later minor versions of its major one, so an older compiler serves a newer card of the same
    generation.
    """
    if major < 8:
        raise ValueError(
            f"compute capability {major}.{minor} is too old: the kernels need 8.0 (A100) or later; use --device cpu"
        )
    fitting = [arch for arch in supported if arch // 10 == major and arch <= 10 * major + minor]
    if not fitting:
        raise ValueError(
            f"this NVRTC (up to sm_{max(supported)}) cannot compile for compute capability {major}.{minor}: "
            f"install newer CUDA wheels"
        )
    arch = max(fitting)
    return "sm_90a" if arch == 90 else f"sm_{arch}"  # the `a`: wgmma and the tensor memory accelerator


@functools.cache
def include_folders() -> tuple[str, ...]:
    """kernels/, CuPy's copy of libcu++, and CUDA's headers."""
    import cupy
    from cupy_backends.cuda.libs import nvrtc

    wheels = importlib.util.find_spec("nvidia")
    locations = wheels.submodule_search_locations or () if wheels else ()
    cuda = cuda_headers(nvrtc.getVersion()[0], locations, cupy.cuda.get_cuda_path())
    bundled = Path(cupy.__file__).parent / "_core/include/cupy/_cccl"
    cccl = [str(folder) for name in ("libcudacxx", "cub", "thrust") if (folder := bundled / name).is_dir()]
    return (str(kernels_folder()), *cccl, str(cuda))


def cuda_headers(major: int, wheel_folders, toolkit: str | None) -> Path:
    """Where CUDA's headers lie for NVRTC `major`: in the pip wheels of that version, which stand in folders of the
    package `nvidia`, or in a toolkit. ValueError where they are in neither.
    """
    wheel = "cuda_runtime" if major == 12 else f"cu{major}"
    candidates = [Path(folder) / wheel / "include" for folder in wheel_folders]
    candidates += [Path(toolkit) / "include"] if toolkit else []
    for folder in candidates:
        if (folder / "cuda_bf16.h").exists():
            return folder
    raise ValueError(
        f"the headers of CUDA {major} were not found: pip install 'cukit[cuda{major}]', or set CUDA_PATH to a toolkit"
    )


def define_options(defines: dict) -> list[str]:
    """-D options: SCALAR=bf16 gives SCALAR=__nv_bfloat16 and SCALAR_BF16=1; the rest go as they are."""
    options = []
    for name, value in sorted(defines.items()):
        if name == "SCALAR":
            options.append(f"-DSCALAR_{value.upper()}=1")
            value = SCALAR_TYPES[value]
        options.append(f"-D{name}={value}")
    return options


def compile_family(family: str, arch: str, defines: dict) -> Compiled:
    """Compile one specialisation for one architecture; RuntimeError with the compiler's words if that fails."""
    from cupy_backends.cuda.libs import nvrtc

    options = (*OPTIONS, f"-arch={arch}", *define_options(defines), *(f"-I{folder}" for folder in include_folders()))
    start = time.perf_counter()
    program = nvrtc.createProgram(source(family), str(kernels_folder() / f"{family}.cu"), (), ())
    try:
        nvrtc.compileProgram(program, options)
        return Compiled(
            family, arch, defines, nvrtc.getCUBIN(program), nvrtc.getProgramLog(program), time.perf_counter() - start
        )
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise RuntimeError(f"kernels/{family}.cu does not compile for {arch} with {defines}: {error}\n{log}") from None
    finally:
        nvrtc.destroyProgram(program)


# ---- the cache of compiled kernels ----


def cache_folder() -> Path:
    """Beside CuPy's own kernel cache, and moved by the same variable."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy/kernel_cache") / "cukit"


def cache_path(family: str, arch: str, defines: dict) -> Path:
    """The file of one specialisation. Its name changes with the sources (CuPy's own key does not see headers), options
    and compiler.
    """
    from cupy_backends.cuda.libs import nvrtc

    key = repr((source_digest(), nvrtc.getVersion(), OPTIONS, sorted(defines.items())))
    words = "-".join(str(value) for _, value in sorted(defines.items(), key=lambda item: item[0] != "SCALAR"))
    return cache_folder() / f"{family}-{words or 'plain'}-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.cubin"


def store(path: Path, cubin: bytes) -> Path:
    """Write `cubin` at `path`, whole or not at all; to a temporary folder if the cache cannot be written. Returns where
    it is.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="cukit-kernels-")) / path.name
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(cubin)
    os.replace(temporary, path)
    return path


def _build(job) -> Compiled:
    family, arch, defines = job
    compiled = compile_family(family, arch, defines)
    store(cache_path(family, arch, defines), compiled.cubin)
    return compiled


def build(archs=None, names=None, scalars=None, processes=None) -> list[Compiled]:
    """Compile every declared specialisation, in parallel, into the cache that the loader reads; in a fixed order.

    archs: which architectures (default: all that each family declares); names: which families; scalars: which of bf16,
    f16, f32.
    """
    jobs = [
        (family, arch, defines)
        for family in names or families()
        for arch in architectures(family)
        if archs is None or arch in archs
        for defines in specialisations(family)
        if scalars is None or defines.get("SCALAR", "bf16") in scalars
    ]
    if len(jobs) == 1:
        return [_build(jobs[0])]
    found = []
    with ProcessPoolExecutor(processes or os.cpu_count()) as pool:
        for compiled in pool.map(_build, jobs):
            found.append(compiled)
            words = " ".join(f"{name}={value}" for name, value in compiled.defines.items())
            logger.info("%d of %d: %s %s %s", len(found), len(jobs), compiled.family, compiled.arch, words)
    return found


# ---- what the compiler says ----


class KernelUse(NamedTuple):
    """What one kernel takes on the card."""

    name: str
    registers: int
    shared_bytes: int
    spill_bytes: int


def kernel_uses(log: str) -> list[KernelUse]:
    """Registers, static shared memory and spills of each kernel, read from NVRTC's log."""
    found = []
    for part in re.split(r"Compiling entry function '", log)[1:]:
        number = functools.partial(_first_number, part)
        found.append(
            KernelUse(
                part.split("'")[0],
                number(r"Used (\d+) registers"),
                number(r"(\d+) bytes smem"),
                number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            )
        )
    return found


def _first_number(text: str, pattern: str) -> int:
    match = re.search(pattern, text)
    return int(match.group(1)) if match else 0


def report(compiled: list[Compiled]) -> str:
    """Registers, shared memory and spills, one line a kernel (what `cukit kernels build --report` prints)."""
    lines = [f"{'kernel':<44} {'defines':<34} {'arch':<8} {'registers':>9} {'shared B':>8} {'spill B':>8}"]
    for item in compiled:
        words = " ".join(f"{name}={value}" for name, value in item.defines.items())
        lines += [
            f"{item.family + '.' + use.name:<44} {words:<34} {item.arch:<8} {use.registers:>9} "
            f"{use.shared_bytes:>8} {use.spill_bytes:>8}"
            for use in kernel_uses(item.log)
        ]
    return "\n".join(lines)
