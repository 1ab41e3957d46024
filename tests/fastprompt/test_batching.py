# SPDX-License-Identifier: Apache-2.0
"""Which rows make up a step."""

import numpy as np
import pytest

from fastprompt.data.batching import BatchPlan
from fastprompt.errors import FastpromptError


def flat(parts):
    return [int(row) for part in parts for rows in part for row in rows]


def test_an_epoch_uses_every_row_once_and_epochs_differ():
    plan = BatchPlan(100, 16, 2, 2, seed=1)
    assert plan.steps_per_epoch == 7
    epochs = [[flat(plan.rows(step)) for step in range(start, start + 7)] for start in (0, 7)]
    for epoch in epochs:
        assert sorted(sum(epoch, [])) == list(range(100))
        assert [len(step) for step in epoch] == [16] * 6 + [4]
    assert epochs[0] != epochs[1]


def test_the_same_rows_for_any_number_of_ranks():
    one, four = BatchPlan(53, 16, 1, 1, seed=3), BatchPlan(53, 16, 1, 4, seed=3)
    for step in range(4):
        assert flat(one.rows(step)) == flat(four.rows(step))
    assert [len(rows) for rows in four.rows(0)[0]] == [4] * 4


def test_a_step_needs_no_history():
    plan = BatchPlan(40, 8, 1, 1, seed=0)
    forward = [flat(plan.rows(step)) for step in range(12)]
    fresh = [flat(BatchPlan(40, 8, 1, 1, seed=0).rows(step)) for step in range(12)]
    assert forward == fresh
    assert forward != [flat(BatchPlan(40, 8, 1, 1, seed=1).rows(step)) for step in range(12)]


@pytest.mark.parametrize(
    ("rows", "world", "accumulation", "steps", "last"),
    [(17, 1, 1, 2, 8), (18, 1, 1, 3, 2), (19, 4, 1, 2, 8), (21, 4, 1, 3, 5), (19, 1, 2, 2, 8), (20, 1, 2, 3, 4)],
)
def test_a_ragged_last_batch_is_used_where_everyone_gets_a_sentence_and_a_negative(
    rows, world, accumulation, steps, last
):
    plan = BatchPlan(rows, 8, accumulation, world, seed=0)
    assert plan.steps_per_epoch == steps
    parts = plan.rows(steps - 1)
    assert len(flat(parts)) == last
    assert all(len(share) >= 1 for part in parts for share in part)
    assert all(sum(map(len, part)) >= 2 for part in parts)
    assert np.ptp([len(share) for share in parts[0]]) <= 1


def test_steps():
    plan = BatchPlan(100, 16, 1, 1, seed=0)
    assert plan.total_steps(1.0, None) == 7
    assert plan.total_steps(0.5, None) == 4
    assert plan.total_steps(3.0, None) == 21
    assert plan.total_steps(3.0, 5) == 5


def test_errors():
    with pytest.raises(
        FastpromptError, match="64 does not divide over 3 ranks × 2 accumulation steps; use a multiple of 6"
    ):
        BatchPlan(1000, 64, 2, 3, seed=0)
    with pytest.raises(FastpromptError, match="has 1 usable rows, one step needs at least 2"):
        BatchPlan(1, 64, 1, 1, seed=0)
