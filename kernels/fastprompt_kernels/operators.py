# SPDX-License-Identifier: Apache-2.0
"""One differentiable operation, two doors: a custom operator for torch.compile, an autograd.Function in eager mode.

torch.compile must not look inside (kernels, chunk loops), so it gets the registered operator, of which it sees shapes
only. In eager mode the operator's bookkeeping (aliasing checks, schema, dispatch) would cost 0.1 to 0.3 ms a call, as
much as a whole small loss; an autograd.Function around the same implementation, setup and backward costs a few
microseconds.
"""

from collections.abc import Callable
from typing import Any

import torch


def differentiable(
    op: Any,
    implementation: Callable[..., Any],
    setup: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """The function to call for ``op``.

    Args:
        op: the result of ``torch.library.custom_op``.
        implementation: the function that ``op`` was made of.
        setup: (ctx, inputs, output), as for ``register_autograd``. It finds ``ctx.compiled`` set.
        backward: (ctx, *upstream), as for ``register_autograd``.
    """

    def setup_operator(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.compiled = True
        setup(ctx, inputs, output)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = implementation(*inputs)
        ctx.compiled = False
        setup(ctx, inputs, output)
        return output

    op.register_autograd(backward, setup_context=setup_operator)
    backward = torch.autograd.function.once_differentiable(backward)
    # Not through Function.setup_context: binding its arguments costs another 0.1 ms a call.
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(implementation.__name__, (torch.autograd.Function,), members)

    def call(*arguments: Any) -> Any:
        return op(*arguments) if torch.compiler.is_compiling() else function.apply(*arguments)

    return call


def chosen(ctx: Any, op: Any, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Within a backward: the operator if the forward went through one, else its implementation."""
    return op if ctx.compiled else implementation
