"""`cukit kernels build` says what it has done while it works."""

import pytest

pytest.importorskip("cupy", reason="compiling kernels needs CuPy and NVRTC: pip install 'cukit[compile]'")

import cukit_cli  # noqa: E402


def test_c14_a_build_of_kernels_shows_progress_on_stderr(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    assert cukit_cli.main(["kernels", "build", "--families", "embedding", "--archs", "sm_80"]) == 0
    shown = capsys.readouterr()
    assert "1 of 3: embedding sm_80" in shown.err and "3 of 3: embedding sm_80" in shown.err
    assert shown.out.startswith("3 modules in ")
