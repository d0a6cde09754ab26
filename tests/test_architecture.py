"""The house rules that a reader cannot see at a glance: who imports whom, equal shelves, no torch."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = [ROOT / "cukit_cli.py", *sorted((ROOT / "cukit").rglob("*.py"))]

# Layer -> the layers it may import (besides itself). A layer is a package or module of cukit, or the command line.
BESIDE = {"optim", "datasets", "tokenizer", "runs", "rewards", "parallel"}
BELOW_ENGINE = {"models", "ops", "autograd", "backend", "options"}
LAYERS = {
    "options": set(),
    "backend.numpy": {"backend"},
    "backend.cuda": {"backend"},
    "backend": set(),
    "autograd": {"backend"},
    "ops": {"autograd", "backend"},
    "models": {"ops", "autograd", "backend", "options"},
    "optim": {"autograd", "backend", "models"},
    "tokenizer": set(),
    "datasets": {"tokenizer"},
    "rewards": set(),
    "parallel": {"backend"},
    "runs": {"models", "backend"},
    "engine": BELOW_ENGINE | {"tokenizer"},
    "trainers": BELOW_ENGINE | BESIDE | {"engine"},
    "bench": BELOW_ENGINE | BESIDE | {"cukit", "engine", "trainers"},
    "commands": BELOW_ENGINE | BESIDE | {"cukit", "engine", "trainers", "bench"},
    "cukit": set(),
    "__main__": {"cukit_cli"},
    "cukit_cli": BELOW_ENGINE | BESIDE | {"cukit", "commands", "engine", "trainers", "bench"},
}
RUNTIME_LIBRARIES = {
    "numpy",
    "ml_dtypes",
    "safetensors",
    "tokenizers",
    "yaml",
    "jinja2",
    "markupsafe",
    "rich",
    "threadpoolctl",
    "psutil",
}
OPTIONAL_LIBRARIES = {"huggingface_hub", "pyarrow", "matplotlib", "math_verify", "mpi4py"}


def name_of(path: Path) -> str:
    """cukit/ops/norm.py -> cukit.ops.norm"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    """The layer of a dotted name, None for a library."""
    if module in ("cukit", "cukit_cli"):
        return module
    if not module.startswith("cukit."):
        return None
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[0] == "backend" and parts[1:2] in (["numpy"], ["cuda"]) else parts[0]


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import, in functions too; `from x import y` of cukit gives x.y."""
    module = name_of(path)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(filter(None, [base, node.module]))
            found += [
                (node.lineno, f"{name}.{alias.name}" if name.startswith("cukit") else name) for alias in node.names
            ]
    return found


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_imports_go_down(path):
    layer = layer_of(name_of(path))
    assert layer in LAYERS, f"{path.relative_to(ROOT)}: add the layer {layer!r} to LAYERS"
    for line, module in imports_of(path):
        target = layer_of(module)
        if target is not None and module.startswith("cukit.") and target not in LAYERS:
            target = "cukit"  # `from cukit import LLM`: a public name
        where = f"{path.relative_to(ROOT)}:{line} imports {module}"
        if target is None:
            library = module.split(".")[0]
            allowed = library in sys.stdlib_module_names or library in RUNTIME_LIBRARIES | OPTIONAL_LIBRARIES
            on_the_gpu_shelf = layer == "backend.cuda" and library in ("cupy", "cupyx", "cupy_backends")
            assert allowed or on_the_gpu_shelf, where
        else:
            assert target == layer or target in LAYERS[layer], f"{where}; {layer} may import {sorted(LAYERS[layer])}"


def test_only_the_loader_compiles_kernels():
    for path in PRODUCT:
        if path != ROOT / "cukit/backend/cuda/loader.py":
            assert "RawModule" not in path.read_text(encoding="utf-8"), path.relative_to(ROOT)


def test_tests_need_no_torch():
    for path in sorted((ROOT / "tests").rglob("*.py")):
        # The script that made the truths, and those that compare with transformers by hand.
        if path.parent.name not in ("golden", "oracle"):
            libraries = {module.split(".")[0] for _, module in imports_of(path)}
            assert not libraries & {"torch", "transformers", "trl"}, path.relative_to(ROOT)


def test_cpu_use_imports_no_cupy():
    code = (
        "import sys, cukit, cukit_cli; from cukit import LLM, SamplingParams, GRPOTrainer, SFTTrainer;"
        "from cukit.backend import backend_for; backend_for('cpu');"
        "sys.exit(' '.join({'cupy', 'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def public_signatures(path: Path) -> dict[str, str]:
    """Public function name -> its arguments with defaults, without annotations."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            found[node.name] = ast.unparse(node.args)
    return found


def test_shelves_have_equal_names_and_signatures():
    for numpy_file in sorted((ROOT / "cukit/backend/numpy").glob("*.py")):
        cuda_file = ROOT / "cukit/backend/cuda" / numpy_file.name
        if not cuda_file.exists():
            continue
        if numpy_file.name == "__init__.py":
            exported = [
                {module.rsplit(".", 1)[-1] for _, module in imports_of(path) if layer_of(module)}
                for path in (numpy_file, cuda_file)
            ]
            assert exported[1] in (set(), exported[0]), "the shelves export different names"
        else:
            assert public_signatures(numpy_file) == public_signatures(cuda_file), numpy_file.name


def test_every_package_is_in_the_wheel():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {name_of(path.parent / "__init__.py") for path in PRODUCT if path.name != "cukit_cli.py"}
    assert folders | {"cukit.data_files", "cukit.kernels"} == set(setup["packages"])
