"""The kernel loader and compiler, without a GPU: signatures, arguments, variants, cache keys. Run: pytest
tests/test_loader.py
"""

import ctypes
import shutil
import struct
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the loader needs CuPy: pip install 'cukit[compile]'")

from cukit.backend.cuda import compile as compiler  # noqa: E402
from cukit.backend.cuda import cublas, loader  # noqa: E402

SOURCE = """
// A comment with extern "C" __global__ void not_a_kernel(int x) {}
extern "C" __global__ void __launch_bounds__(128 * (2 + 2), 1)
first(SCALAR* __restrict__ y, const float *w, int rows, long long stride, float eps, unsigned long long seed) {}
extern "C" __global__ __launch_bounds__(64) void second(/* nothing */ const void* x) {}
extern "C" __global__ void third() {}
"""


class RecordingKernel:
    """Stands for cupy.RawKernel."""

    shared_size_bytes = 128
    kernel = SimpleNamespace(ptr=1234)

    def __init__(self):
        self.max_dynamic_shared_size_bytes = 0


@pytest.fixture
def launches(monkeypatch):
    """What the driver is told: (function, grid, block, shared, bytes of the arguments) of each launch."""
    found = []

    def launch(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        kind, buffer, size_kind, size, end = (ctypes.c_void_p * 5).from_address(extra)
        assert (kind, size_kind, end, parameters) == (1, 2, None, 0)
        nbytes = ctypes.c_size_t.from_address(size).value
        found.append((function, (gx, gy, gz), (bx, by, bz), shared, ctypes.string_at(buffer, nbytes)))

    monkeypatch.setattr(loader.driver, "launchKernel", launch)
    monkeypatch.setattr(loader.cp.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=0))
    return found


def kernel(name="first"):
    raw = RecordingKernel()
    return raw, loader.Kernel(f"test.{name}", raw, loader.parse_signatures(SOURCE)[name], {"SCALAR": "__nv_bfloat16"})


def test_signatures_are_read_from_the_source():
    found = {name: [str(p) for p in parameters] for name, parameters in loader.parse_signatures(SOURCE).items()}
    assert found == {
        "first": ["SCALAR* y", "float* w", "int rows", "long long stride", "float eps", "unsigned long long seed"],
        "second": ["void* x"],
        "third": [],
    }


def test_arguments_lie_as_a_c_compiler_lays_them_out(launches):
    kernel()[1](4, (32, 2), None, None, 7, 2**40, 0.1, 2**63)
    ((function, grid, block, shared, arguments),) = launches
    assert (function, grid, block, shared) == (1234, (4, 1, 1), (32, 2, 1), 0)
    assert arguments == struct.pack("=QQi4xqf4xQ", 0, 0, 7, 2**40, 0.1, 2**63)


def test_arguments_of_launches_within_one_another_do_not_mix(launches, monkeypatch):
    """A thread, or a finalizer, may launch while another launch is under way."""
    _, first = kernel()
    launch = loader.driver.launchKernel

    def launch_twice(*arguments):
        monkeypatch.setattr(loader.driver, "launchKernel", launch)
        first(1, 32, None, None, 2, 2, 2.0, 2)
        launch(*arguments)

    monkeypatch.setattr(loader.driver, "launchKernel", launch_twice)
    first(1, 32, None, None, 1, 1, 1.0, 1)
    assert [one[-1] for one in launches] == [struct.pack("=QQi4xqf4xQ", 0, 0, n, n, n, n) for n in (2, 1)]


def test_another_thread_may_take_the_last_unused_memory(launches, monkeypatch):
    class Taken(list):
        """It looks as if there was one, and then there is none."""

        def __len__(self):
            return 1

        def pop(self):
            raise IndexError

    monkeypatch.setattr(loader, "_unused", Taken())
    kernel()[1](1, 32, None, None, 1, 1, 1.0, 1)
    assert [one[-1] for one in launches] == [struct.pack("=QQi4xqf4xQ", 0, 0, 1, 1, 1, 1)]


def test_a_thread_without_a_context_gets_one(monkeypatch, launches):
    launch, contexts = loader.driver.launchKernel, []

    class NoContext(Exception):
        status = loader.INVALID_CONTEXT

    def launch_with_a_context(*arguments):
        if not contexts:
            raise NoContext
        launch(*arguments)

    monkeypatch.setattr(loader.driver, "CUDADriverError", NoContext)
    monkeypatch.setattr(loader.driver, "launchKernel", launch_with_a_context)
    monkeypatch.setattr(loader.cp.cuda.runtime, "free", contexts.append)
    kernel("third")[1](1, 32)
    assert len(launches) == len(contexts) == 1


def test_an_empty_grid_launches_nothing(launches):
    _, first = kernel()
    first(0, 32, None, None, 0, 0, 0.0, 0)
    first((3, 0), 32, None, None, 0, 0, 0.0, 0)
    assert not launches


def test_large_shared_memory_is_allowed_once(launches):
    raw, first = kernel()
    first(1, 32, None, None, 0, 0, 0.0, 0, shared=48 * 1024 - 128)
    assert raw.max_dynamic_shared_size_bytes == 0
    first(1, 32, None, None, 0, 0, 0.0, 0, shared=100_000)
    first(1, 32, None, None, 0, 0, 0.0, 0, shared=60_000)
    assert raw.max_dynamic_shared_size_bytes == 100_000


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((None, None, 1, 1, 0.5), TypeError, "takes 6 arguments"),
        ((None, None, 1.5, 1, 0.5, 1), TypeError, "float"),
        ((None, None, 2**31, 1, 0.5, 1), OverflowError, "2147483648"),
        ((np.zeros(3), None, 1, 1, 0.5, 1), TypeError, "wants a cupy array or None, got ndarray"),
    ],
)
def test_wrong_arguments_are_refused(launches, arguments, error, words):
    with pytest.raises(error, match=words):
        kernel()[1](1, 32, *arguments)
    assert not launches


def test_wrong_variants_are_refused():
    with pytest.raises(ValueError, match="no float64 kernel"):
        loader.load("norm", "float64")
    with pytest.raises(ValueError, match="not built for .*'HEAD_LIMIT': '96'"):
        loader.load("rope", "bfloat16", HEAD_LIMIT=96)
    with pytest.raises(ValueError, match="no kernel family 'nothing'"):
        loader.load("nothing", "bfloat16")
    with pytest.raises(AttributeError, match="has no kernel 'nothing'"):
        loader.load("norm", "bfloat16").nothing  # noqa: B018


def test_a_module_is_made_once():
    assert loader.load("norm", np.dtype("float16")) is loader.load("norm", np.dtype("float16"))


@pytest.mark.parametrize(
    "capability, arch",
    [((8, 0), "sm_80"), ((8, 7), "sm_86"), ((9, 0), "sm_90a"), ((10, 3), "sm_100"), ((12, 1), "sm_120")],
)
def test_architecture_of_a_card(capability, arch):
    assert compiler.architecture_for(*capability, [75, 80, 86, 90, 100, 120]) == arch


@pytest.mark.parametrize("capability, words", [((7, 5), "too old"), ((13, 0), "install newer CUDA wheels")])
def test_architectures_that_cannot_be_served(capability, words):
    with pytest.raises(ValueError, match=words):
        compiler.architecture_for(*capability, [75, 80, 90])


def test_an_edited_header_changes_the_cache_key(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    shutil.copytree(compiler.kernels_folder(), folder)
    monkeypatch.setattr(compiler, "kernels_folder", lambda: folder)
    keys = []
    for text in ("// edited\n", ""):
        with (folder / "common.cuh").open("a") as file:
            file.write(text)
        compiler.source_digest.cache_clear()
        keys.append(compiler.cache_path("norm", "sm_80", {"SCALAR": "bf16"}))
    compiler.source_digest.cache_clear()
    monkeypatch.undo()
    before = compiler.cache_path("norm", "sm_80", {"SCALAR": "bf16"})
    assert keys[0] == keys[1] != before
    assert (
        before
        != compiler.cache_path("norm", "sm_90a", {"SCALAR": "bf16"})
        != compiler.cache_path("norm", "sm_90a", {"SCALAR": "f16"})
    )


def test_a_compile_error_names_the_file_and_line(tmp_path, monkeypatch):
    (tmp_path / "broken.cu").write_text(
        '// specialise: SCALAR=f32\n// arch: sm_80\n#include "common.cuh"\nthis is not C++;\n'
    )
    shutil.copy(compiler.kernels_folder() / "common.cuh", tmp_path)
    monkeypatch.setattr(compiler, "kernels_folder", lambda: tmp_path)
    compiler.include_folders.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"broken\.cu\(4\)"):
            compiler.compile_family("broken", "sm_80", {"SCALAR": "f32"})
    finally:
        compiler.include_folders.cache_clear()
        compiler.source.cache_clear()


@pytest.mark.parametrize("major, wheel", [(12, "cuda_runtime"), (13, "cu13")])
def test_headers_of_both_cuda_versions_are_found(major, wheel, tmp_path):
    """Pip wheels of this version come before a toolkit; those of the other version are not taken."""
    folders = {name: tmp_path / name / "include" for name in ("cuda_runtime", "cu13", "toolkit")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    with pytest.raises(ValueError, match=f"the headers of CUDA {major} were not found: .*cuda{major}"):
        compiler.cuda_headers(major, [tmp_path], None)
    (folders["toolkit"] / "cuda_bf16.h").touch()
    other = "cu13" if major == 12 else "cuda_runtime"
    (folders[other] / "cuda_bf16.h").touch()
    assert compiler.cuda_headers(major, [tmp_path], str(tmp_path / "toolkit")) == folders["toolkit"]
    (folders[wheel] / "cuda_bf16.h").touch()
    assert compiler.cuda_headers(major, [tmp_path], str(tmp_path / "toolkit")) == folders[wheel]


@pytest.mark.parametrize("version", ["12", "13", "12.9.1.4"])
def test_the_cublas_that_cupy_loaded_is_found(version):
    path = f"/home/me/my project/.venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcublasLt.so.{version}"
    maps = "\n".join(
        [
            "7f1c00000000-7f1c00021000 rw-p 00000000 00:00 0 ",
            "7f1c10000000-7f1c18000000 r--p 00000000 fe:01 42                     /usr/lib/libcublas.so.12",
            f"7f1c20000000-7f1c26000000 r--p 00000000 fe:01 43                     {path}",
            f"7f1c26000000-7f1c26001000 r-xp 06000000 fe:01 43                     {path}",
        ]
    )
    assert cublas.mapped_library(maps) == path
    with pytest.raises(RuntimeError, match="loaded no libcublasLt.so"):
        cublas.mapped_library(maps.replace(path, "/usr/lib/libcudart.so.12"))
