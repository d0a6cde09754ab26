"""Numbers that a kernel fixes are read from its source, without a compiler: the reader against the compiler."""

import ast
import re

import pytest

pytest.importorskip("cupy", reason="the readers of kernel sources stand beside the compiler, which needs CuPy")

from cukit.backend.cuda import compile as compiler  # noqa: E402
from cukit.backend.cuda import constants, loader  # noqa: E402

SHELF = [path for path in (compiler.Path(compiler.__file__).parent).glob("*.py")]


def calls(tree, *names):
    """The calls of a function of one of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) in names:
            yield node


def used_constants() -> dict[str, set[str]]:
    """Family -> the constants that launchers read from its source."""
    found = {}
    for path in SHELF:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        families = {call.args[0].value for call in calls(tree, "load") if isinstance(call.args[0], ast.Constant)}
        for call in calls(tree, "source_constant"):
            words = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
            if len(words) == 2:
                found.setdefault(words[0], set()).add(words[1])
            elif words:  # of a loaded module
                for family in families:
                    found.setdefault(family, set()).update(words)
    return found


def test_launchers_read_constants():
    assert {"embedding", "linear", "loss", "norm", "rope", "sampling"} <= set(used_constants())


@pytest.mark.parametrize("family", sorted(used_constants()))
def test_the_compiler_agrees(family, monkeypatch):
    """A static_assert for each constant and each whole variant (one with fewer defines holds a part of the file)."""
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--fdevice-syntax-only"))
    source, names = compiler.source(family), used_constants()[family]
    variants = compiler.specialisations(family)
    for variant in (variant for variant in variants if len(variant) == max(map(len, variants))):
        values = {name: constants.source_constant(family, name, **variant) for name in names}
        for wrong in (0, 1):
            asserts = "".join(f'static_assert({name} == {value + wrong}, "");\n' for name, value in values.items())
            monkeypatch.setattr(compiler, "source", lambda _: f"{source}\n{asserts}")  # noqa: B023
            if wrong:
                with pytest.raises(RuntimeError, match="static assertion failed"):
                    compiler.compile_family(family, "sm_80", variant)
            else:
                compiler.compile_family(family, "sm_80", variant)


@pytest.mark.parametrize("path", SHELF, ids=lambda path: path.stem)
def test_no_launcher_repeats_a_constant_of_its_source(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    families = {call.args[0].value for call in calls(tree, "load") if isinstance(call.args[0], ast.Constant)}
    fixed = set().union(*(constants._constant_expressions(family) for family in families))
    for node in tree.body:
        if isinstance(node, ast.Assign) and not [*calls(node, "source_constant")]:
            names = {name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)}
            assert not names & fixed, f"{path.name}:{node.lineno} repeats {names & fixed}: use source_constant"


def folder(monkeypatch, tmp_path, **files):
    for name, text in files.items():
        (tmp_path / name.replace("_cu", ".cu")).write_text(text)
    monkeypatch.setattr(constants, "kernels_folder", lambda: tmp_path)
    monkeypatch.setattr(constants, "_constant_expressions", constants._constant_expressions.__wrapped__)


def test_what_can_be_read(monkeypatch, tmp_path):
    source = """
        #include "base.cuh"
        #define COUNT 5  // five
        // constexpr int HIDDEN = 1;
        constexpr int TILE = 64, THREADS = 2 * WARP, LANES = LIMIT / 2 / VECTOR < 8 ? LIMIT / 2 / VECTOR : 8;
        constexpr int SIZE = Tiles::SIZE<TILE>;
        constexpr int GROUPS = THREADS / LANES; constexpr float NOT_AN_INTEGER = 1.5f;
    """
    base = "constexpr int WARP = 32;\nconstexpr int VECTOR = 16 / sizeof(SCALAR);\n"
    folder(monkeypatch, tmp_path, x_cu=source, base_cuh=base)

    def value(name, **defines):
        return constants.source_constant("x", name, **defines)

    assert [value(name) for name in ("COUNT", "TILE", "THREADS", "WARP")] == [5, 64, 64, 32]
    assert [value("VECTOR", SCALAR=scalar) for scalar in ("bf16", "f16", "f32")] == [8, 8, 4]
    assert value("GROUPS", SCALAR="bf16", LIMIT=64) == 16 and value("LANES", SCALAR="f32", LIMIT="256") == 8
    for name in ("HIDDEN", "NOT_AN_INTEGER", "LANES", "NOWHERE"):
        with pytest.raises(ValueError, match="has 0 values for"):
            value(name, SCALAR="bf16")
    with pytest.raises(ValueError, match="SIZE = Tiles::SIZE<TILE> is more than integer arithmetic"):
        value("SIZE")


def test_a_constant_with_two_values_is_refused(monkeypatch, tmp_path):
    folder(monkeypatch, tmp_path, x_cu="#if A\nconstexpr int N = 1;\n#else\nconstexpr int N = 2;\n#endif\n")
    with pytest.raises(ValueError, match=re.escape("kernels/x.cu has 2 values for N: want one")):
        constants.source_constant("x", "N")


def test_a_module_knows_its_variant():
    kernels = loader.load("rope", "float32", HEAD_LIMIT=64)
    assert kernels.source_constant("GROUPS") == 128 // min(8, 64 // 2 // 4)
    assert kernels._raw is None, "nothing was compiled"
