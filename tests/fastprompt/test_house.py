# SPDX-License-Identifier: Apache-2.0
"""What may import what, what ships, and the trap of the folder named kernels."""

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support import ROOT

FORBIDDEN = {
    # module prefix: what it must not import
    "fastprompt_kernels": ("fastprompt", "transformers", "deepspeed", "numpy"),
    "fastprompt.data": ("fastprompt.model", "fastprompt.trainer", "transformers"),
    "fastprompt.prompts": ("fastprompt.model", "fastprompt.data", "fastprompt.trainer", "transformers"),
    "fastprompt.model": ("fastprompt.data", "fastprompt.objective", "fastprompt.trainer"),
    "fastprompt.evaluation": ("fastprompt.model", "fastprompt.trainer", "torch"),
    "fastprompt.objective": ("fastprompt.trainer", "fastprompt.checkpoint", "fastprompt.engine"),
    "fastprompt": ("fastprompt.reference",),
    # Without triton the package must still import: its kernels are loaded when first needed.
    "fastprompt_kernels.info_nce": ("triton",),
    "fastprompt_kernels.info_nce_torch": ("triton",),
    "fastprompt_kernels.mask_delta_pool": ("triton",),
    "fastprompt_kernels.prompt_info_nce": ("triton",),
    "fastprompt_kernels.packed_attention": ("triton",),
    "fastprompt_kernels.packed_attention_torch": ("triton",),
    "fastprompt_kernels.dropout_add": ("triton",),
    "fastprompt_kernels.counter_rng": ("triton",),
}
ONLY_IN = {"deepspeed": ("fastprompt.engine",), "transformers": ("fastprompt.model", "fastprompt.cli")}


def sources():
    for root in (ROOT, ROOT / "kernels"):
        for package in ("fastprompt", "fastprompt_kernels"):
            for path in sorted((root / package).rglob("*.py")):
                name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
                yield name, path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(name, prefix):
    return name == prefix or name.startswith(prefix + ".")


def test_imports_go_one_way():
    checked = 0
    for module, path in sources():
        for imported in imports(path):
            for prefix, forbidden in FORBIDDEN.items():
                if inside(module, prefix):
                    for name in forbidden:
                        assert not inside(imported, name), f"{module} imports {imported}"
                        checked += 1
            for library, rooms in ONLY_IN.items():
                if inside(imported, library):
                    assert any(inside(module, room) for room in rooms), f"{module} imports {imported}"
    assert checked > 100


def test_every_source_names_its_licence():
    rooms = ("fastprompt", "kernels", "bench", "tests")
    files = [*ROOT.glob("*.py"), *(path for room in rooms for path in (ROOT / room).rglob("*.py"))]
    assert len(files) > 30
    for path in files:
        assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0"), path


def test_no_environment_reads_below_the_command_line():
    allowed = {
        "fastprompt.cli",
        "fastprompt.engine",
        "fastprompt.demo",
        "fastprompt.data.cache",
        "fastprompt.trainer",
        "fastprompt_kernels.aot",  # a command of its own
    }
    for module, path in sources():
        if module not in allowed:
            assert "os.environ" not in path.read_text(), module


def test_the_wheel_has_both_packages_and_the_recipes(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "fastprompt/cli.py", "fastprompt/py.typed", "fastprompt/recipes/unsup-bert-large.yaml",
        "fastprompt/data/cache.py", "fastprompt/model/encoder.py", "fastprompt/evaluation/sts.py",
        "fastprompt_kernels/info_nce.py", "fastprompt_kernels/info_nce_triton.py", "fastprompt_kernels/py.typed",
    ):  # fmt: skip
        assert name in names
    assert not [n for n in names if n.startswith(("kernels/", "tests/", "bench/"))]


@pytest.mark.parametrize("installed", [False, True], ids=["no library kernels", "library kernels"])
def test_transformers_imports_from_the_repository_root(tmp_path, installed):
    """``deepspeed train.py`` puts the root on sys.path, where the folder kernels must not pass for the library."""
    if installed:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text("LIBRARY = True\n")
        info = tmp_path / "kernels-99.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 99.0\n")
    code = "import importlib.util, transformers; from transformers import BertModel"
    if installed:
        code += "; import kernels; assert kernels.LIBRARY"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    script = tmp_path / "check.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}\n")
    subprocess.run([sys.executable, str(script)], check=True, cwd=ROOT, env=environment)
    assert not Path(ROOT, "kernels", "__init__.py").exists()
