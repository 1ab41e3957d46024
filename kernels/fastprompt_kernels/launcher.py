# SPDX-License-Identifier: Apache-2.0
"""The one place that starts Triton kernels, and the tile sizes it starts them with.

One fixed tile a kernel, dtype and architecture by default; ``autotune()`` tries the neighbours instead, once a shape.
``recording`` collects launches instead of starting them: the ahead-of-time compiler and the tests of memory and
launch counts run the host code on the meta device through it, so that they see exactly what a GPU would.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from triton import knobs

ARCHITECTURES = ("sm_80", "sm_90", "gfx942")


@dataclass(frozen=True)
class Tile:
    """Block sizes by their kernel argument, and how the compiler is to spread them."""

    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Pointer:
    """A tensor argument of a recorded launch; the tensor itself is not kept alive."""

    dtype: torch.dtype
    byte_offset: int


@dataclass(frozen=True)
class Launch:
    """One recorded kernel launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    tile: Tile


_recording: tuple[str, list[Launch]] | None = None
_autotune = False


@contextmanager
def recording(architecture: str) -> Iterator[list[Launch]]:
    """Collect launches, tiled as for ``architecture``, instead of starting them."""
    global _recording
    before, launches = _recording, list[Launch]()
    _recording = (architecture, launches)
    try:
        yield launches
    finally:
        _recording = before


def autotune(enabled: bool = True) -> None:
    """Try several tiles at the first call of each shape and keep the fastest; off by default.

    Each candidate is compiled (about a second each, at the first call only), which pays for long runs of one shape.
    """
    global _autotune
    _autotune = enabled


def architecture(device: torch.device) -> str:
    """The key of the tile table."""
    if _recording is not None:
        return _recording[0]
    if knobs.runtime.interpret:
        return "interpreter"
    return _device_architecture(device.index or 0)


@cache
def _device_architecture(index: int) -> str:
    if torch.version.hip:
        return "gfx942"
    return "sm_90" if torch.cuda.get_device_capability(index)[0] in (9, 10) else "sm_80"


def product_tile(device: torch.device, dtype: torch.dtype) -> Tile:
    """Tile of the matrix products."""
    return _product_candidates(architecture(device), dtype.itemsize)[0]


def _product_candidates(arch: str, itemsize: int) -> list[Tile]:
    """The default first. Chosen to compile without spills at every width; see the table in kernels/README.md."""

    def tile(m: int, n: int, k: int, warps: int, stages: int) -> Tile:
        return Tile((("BLOCK_M", m), ("BLOCK_N", n), ("BLOCK_K", k)), warps, stages)

    if arch == "interpreter":
        return [tile(32, 32, 16, 1, 1)]
    if itemsize == 4:  # IEEE float32 runs on the ordinary units
        return [tile(64, 64, 16, 4, 3), tile(128, 64, 16, 8, 3), tile(32, 32, 32, 4, 3)]
    if arch == "sm_90":
        return [tile(128, 128, 64, 8, 4), tile(128, 256, 64, 8, 3), tile(64, 128, 64, 4, 4), tile(64, 64, 64, 4, 4)]
    if arch == "gfx942":
        return [tile(128, 128, 32, 8, 2), tile(128, 128, 64, 8, 1), tile(64, 64, 64, 4, 2)]
    return [tile(128, 128, 32, 8, 4), tile(64, 128, 32, 4, 4), tile(64, 64, 64, 4, 3)]


def launch(
    kernel: Any,
    grid: Callable[[dict[str, Any]], tuple[int, ...]],
    *arguments: Any,
    tile: Tile,
    tuned: tuple[str, ...] = (),
    accumulates: tuple[str, ...] = (),
    **constants: Any,
) -> None:
    """Start ``kernel``.

    Args:
        kernel: a ``triton.jit`` function; its parameters are pointers, sizes, strides, scalars, then constants.
        grid: from the constants and blocks to the number of programs.
        tile: the fixed tile.
        tuned: for matrix products, the size arguments whose values choose a tile when autotuning.
        accumulates: pointer arguments that the kernel reads and writes.
        constants: ``tl.constexpr`` arguments other than the blocks.
    """
    blocks = dict(tile.blocks)
    if _recording is not None:
        described = tuple(
            Pointer(a.dtype, int(a.storage_offset()) * a.element_size()) if isinstance(a, torch.Tensor) else a
            for a in arguments
        )
        _recording[1].append(Launch(kernel, grid({**constants, **blocks}), described, constants, tile))
        return
    first = next(a for a in arguments if isinstance(a, torch.Tensor))
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device(first.device) if first.device.type == "cuda" else nullcontext():
        if _autotune and tuned and not knobs.runtime.interpret:
            arch = architecture(first.device)
            _autotuned(kernel, arch, first.element_size(), tuned, accumulates)[grid](*arguments, **constants)
        else:
            kernel[grid](*arguments, **constants, **blocks, num_warps=tile.num_warps, num_stages=tile.num_stages)


@cache
def _autotuned(kernel: Any, arch: str, itemsize: int, tuned: tuple[str, ...], accumulates: tuple[str, ...]) -> Any:
    configs = [
        triton.Config(dict(t.blocks), num_warps=t.num_warps, num_stages=t.num_stages)
        for t in _product_candidates(arch, itemsize)
    ]
    return triton.autotune(
        configs, key=list(tuned), restore_value=list(accumulates), prune_configs_by={"early_config_prune": prune}
    )(kernel)


def prune(configs: list[Any], named_args: dict[str, Any], **_: Any) -> list[Any]:
    """Candidates whose tile is not larger than the problem in a dimension where a smaller one exists."""
    sizes = (("BLOCK_M", "num_rows"), ("BLOCK_N", "num_columns"))
    kept = [
        c
        for c in configs
        if all(c.kwargs[block] <= max(64, triton.next_power_of_2(named_args[size])) for block, size in sizes)
    ]
    return kept or configs[:1]
