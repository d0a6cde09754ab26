"""Every kernel compiles, on a machine without a GPU. Run: pytest tests/test_kernels_compile.py (bf16), -m compile
(everything).
"""

import pytest

pytest.importorskip("cupy", reason="compiling kernels needs CuPy and NVRTC: pip install 'cukit[compile]'")

from cukit.backend.cuda import compile as compiler  # noqa: E402
from cukit.backend.cuda.loader import parse_signatures  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))


def check(compiled):
    """The loader can call what was compiled, nothing spills at head_dim 64 and 128, and no wgmma waits for the one
    before it.
    """
    for item in compiled:
        assert "wgmma.mma_async instructions are serialized" not in item.log, (
            f"{item.family} {item.defines} {item.arch}: {item.log}"
        )
        uses = compiler.kernel_uses(item.log)
        names, whole = {use.name for use in uses}, set(parse_signatures(compiler.source(item.family)))
        # a variant without defines may hold the kernels that need none (paged_attention's block tables)
        assert names == whole or (not item.defines and names and names < whole), item.family
        assert compiler.cache_path(item.family, item.arch, item.defines).read_bytes() == item.cubin
        if item.defines.get("HEAD_DIM", item.defines.get("HEAD_LIMIT")) in ("64", "128"):
            spilling = [(use.name, use.spill_bytes) for use in uses if use.spill_bytes]
            assert not spilling, f"{item.family} {item.defines} {item.arch}: {spilling}"


@pytest.mark.parametrize("family", compiler.families())
def test_bf16(family):
    check(compiler.build(archs=["sm_80", "sm_90a"], names=[family], scalars=["bf16"]))


@pytest.mark.compile
@pytest.mark.parametrize("family", compiler.families())
def test_every_specialisation(family):
    compiled = compiler.build(names=[family])
    check(compiled)
    print(compiler.report(compiled))
