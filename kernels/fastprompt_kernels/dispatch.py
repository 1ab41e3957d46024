# SPDX-License-Identifier: Apache-2.0
"""Which implementation serves a call: decided once a call, here, by device and dtype.

``reference``  the formula in plain torch, no custom backward: the oracle
``torch``      memory-flat torch, any device, any float dtype
``triton``     compiled kernels on CUDA and HIP; on a CPU only under ``TRITON_INTERPRET=1``
``auto``       triton where it can run, else torch
"""

import importlib.util
import logging
from functools import cache

import torch
from torch import Tensor

BACKENDS = ("auto", "reference", "torch", "triton")
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

log = logging.getLogger(__name__)
_default = "auto"


def set_backend(name: str) -> None:
    """Choose the backend of every call that does not name one.

    Raises:
        ValueError: no such backend.
    """
    global _default
    if name not in BACKENDS:
        raise ValueError(f"there is no backend {name!r}; choose one of {', '.join(BACKENDS)}")
    _default = name


def get_backend() -> str:
    """The backend of calls that do not name one."""
    return _default


def choose_backend(op: str, backend: str | None, tensor: Tensor, unsupported: str = "") -> str:
    """ "reference", "torch" or "triton" for one call.

    Args:
        op: the public function's name, for messages.
        backend: what the caller asked for; None for the default of ``set_backend``.
        tensor: the input whose device and dtype decide.
        unsupported: why the op's Triton kernels cannot serve this call, if so.

    Raises:
        ValueError: an unknown backend, or "triton" asked for where it cannot run. "auto" falls back instead.
    """
    asked = _default if backend is None else backend
    if asked not in BACKENDS:
        raise ValueError(f"{op}: there is no backend {asked!r}; choose one of {', '.join(BACKENDS)}")
    if asked in ("reference", "torch"):
        return asked
    # Under the interpreter, too, "auto" stays with torch on a CPU: interpreting is a thousand times slower.
    if asked == "auto" and tensor.device.type == "cpu":
        obstacle, chosen = "", "torch"
    else:
        obstacle = unsupported or _triton_obstacle(tensor)
        chosen = "torch" if obstacle else "triton"
    if asked == "triton" and obstacle:
        raise ValueError(f"{op}: backend 'triton' cannot serve this call: {obstacle}")
    if asked == "auto" and not torch.compiler.is_compiling():
        _log_choice(op, chosen, tensor.device.type, str(tensor.dtype), obstacle)
    return chosen


def _triton_obstacle(tensor: Tensor) -> str:
    if tensor.dtype not in TRITON_DTYPES:
        return f"{tensor.dtype} (it knows float32, float16 and bfloat16)"
    if not TRITON_INSTALLED:
        return "triton is not installed (pip install triton)"
    if tensor.device.type == "cpu" and not _interpreting():
        return "the tensors are on a CPU (set TRITON_INTERPRET=1 before the first import to interpret the kernels)"
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        return f"the tensors are on {tensor.device.type} (it knows CUDA and HIP)"
    return ""


def _interpreting() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


@cache
def _log_choice(op: str, chosen: str, device: str, dtype: str, reason: str) -> None:
    """Cached, so that each distinct choice is logged once."""
    log.info("%s on %s in %s: %s backend%s", op, device, dtype, chosen, f" ({reason})" if reason else "")


def check_tensors(op: str, **tensors: Tensor | None) -> None:
    """Raise a ValueError that names the culprit unless all tensors are float, of one dtype, on one device."""
    (first_name, first), *rest = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    if not first.is_floating_point():
        raise ValueError(f"{op} wants {first_name} of a float dtype, got {first.dtype}")
    for name, tensor in rest:
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"{op} wants one dtype: {first_name} is {first.dtype}, {name} is {tensor.dtype}; cast one of them"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"{op} wants one device: {first_name} is on {first.device}, {name} on {tensor.device}; move one"
            )


def check_index(op: str, name: str, index: Tensor, like: Tensor) -> None:
    """Raise a ValueError unless ``index`` is int64 and on the device of ``like``."""
    if index.dtype != torch.int64:
        raise ValueError(f"{op} wants {name} of dtype int64, got {index.dtype}")
    if index.device != like.device:
        raise ValueError(f"{op} wants one device: {name} is on {index.device}, the rows on {like.device}")


def check_range(op: str, name: str, index: Tensor, size: int) -> None:
    """Raise an IndexError if a CPU ``index`` leaves [0, size).

    On a GPU this would wait for the device; there the kernels assert instead when Triton's debug mode is on
    (``TRITON_DEBUG=1``).
    """
    if index.device.type != "cpu" or index.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < 0 or high >= size:
        raise IndexError(f"{op}: {name} reaches {low if low < 0 else high}, but there are rows 0 … {size - 1}")
