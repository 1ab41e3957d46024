# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiled for three architectures, the checks on the result, and the generated tables of kernels/README.md.

Compiling and interpreting exclude each other in one process, so the compiler runs in another.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
from support import ROOT

README = ROOT / "kernels" / "README.md"


def compiling(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT)


@pytest.mark.integration
def test_every_kernel_compiles_without_spills_and_the_table_is_what_comes_out(tmp_path):
    page = tmp_path / "README.md"
    shutil.copy(README, page)
    result = compiling("-m", "fastprompt_kernels.aot", "--write", str(page))
    assert result.returncode == 0, result.stderr[-3000:]
    made, kept = page.read_text(), README.read_text()
    rows = [line.split("|")[1:-1] for line in made.splitlines() if line.startswith("| `_")]
    kernels = {row[0].strip(" `") for row in rows}
    sources = "".join(path.read_text() for path in (ROOT / "kernels" / "fastprompt_kernels").glob("*_triton.py"))
    assert kernels == set(re.findall(r"^def (_\w+_kernel)\(", sources, re.M))
    for kernel in kernels:
        seen = {(row[2].strip(), row[4].strip()) for row in rows if row[0].strip(" `") == kernel}
        assert {chip for _, chip in seen} == {"sm_80", "sm_90", "gfx942"}
        assert len(seen) % 3 == 0
    version = re.compile(r"\d+ kernels compiled by triton \S+")
    if version.search(made).group() == version.search(kept).group():
        assert made == kept, "run: python -m fastprompt_kernels.aot --write kernels/README.md"
    else:  # another compiler allocates other registers; the set of kernels is the same
        assert {line.split("|")[1] for line in kept.splitlines() if line.startswith("| `_")} == {
            row[0] for row in rows
        }


@pytest.mark.parametrize(
    ("tile", "problem"),
    [
        ("128, 128, 32, 4, 4", "bytes spilled"),
        ("128, 128, 128, 8, 4", "bytes of shared memory, the chip has less"),
    ],
)
def test_a_bad_tile_fails(tile, problem):
    code = f"""
from fastprompt_kernels import aot, launcher
m, n, k, warps, stages = {tile}
launcher._product_candidates = lambda arch, itemsize: [
    launcher.Tile((("BLOCK_M", m), ("BLOCK_N", n), ("BLOCK_K", k)), warps, stages)]
aot._specimens = lambda: {{"chunked": (aot._run_info_nce, (768,))}}
aot.DTYPES = (aot.torch.float16,)
raise SystemExit(aot.main(["--architecture", "sm_80"]))
"""
    result = compiling("-c", code)
    assert result.returncode == 1, result.stderr[-2000:]
    assert problem in result.stderr


def test_refuses_to_compile_under_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "fastprompt_kernels.aot"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 1
    assert "unset it" in result.stderr


def test_the_roofline_in_the_readme_is_what_comes_out():
    from fastprompt_kernels import roofline

    section = README.read_text().split(roofline.BEGIN)[1].split(roofline.END)[0]
    assert section.strip() == roofline.table(), "run: python -m fastprompt_kernels.roofline --write kernels/README.md"


def test_roofline_counts_three_products():
    from fastprompt_kernels import roofline

    flops, moved = roofline.work(1024, 768)
    assert flops == 3 * 2 * 1024 * 1024 * 768
    assert moved > 2 * 1024 * 768 * 2 * 2  # at least reads the rows and writes their gradients


def test_readme_example():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    scope: dict = {}
    exec(code, scope)
    assert scope["query"].grad is not None
