# SPDX-License-Identifier: Apache-2.0
"""What the tests of the kernels share."""

import pytest
import torch


@pytest.fixture
def poisoned():
    """Uninitialised memory holds NaN, and nondeterministic operations raise: what is not written shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
