# SPDX-License-Identifier: Apache-2.0
"""STS files and scores, neighbours and geometry."""

import numpy as np
import pytest
from scipy.stats import spearmanr
from support import PACKAGED_MODEL

from fastprompt.errors import FastpromptError
from fastprompt.evaluation import unit_rows
from fastprompt.evaluation.neighbours import (
    alignment,
    anisotropy,
    evaluate_neighbours,
    load_pairs,
    nearest,
    neighbour_ranks,
    uniformity,
)
from fastprompt.evaluation.sts import TASKS, evaluate_sts, format_table, load_task, load_tasks, sts_score
from fastprompt.model import PromptEncoder
from fastprompt.model.encoder import reconcile


@pytest.fixture
def sts_dir(tmp_path):
    """Every task in SentEval's layout, with sentences of our own and the oddities of the real files."""
    for year in range(12, 17):
        folder = tmp_path / "STS" / f"STS{year}-en-test"
        folder.mkdir(parents=True)
        folder.joinpath("STS.input.one.txt").write_text('a cat\tthe cat\nno score\there\n"quoted\tx y\n')
        folder.joinpath("STS.gs.one.txt").write_text("5.0\n\n1.5\n")
        folder.joinpath("STS.input.two.txt").write_bytes("\ufeffb dog\tthe dog\nx\x85y\tz\n".encode())
        folder.joinpath("STS.gs.two.txt").write_text("4.0\n0.0\n")
        folder.joinpath("STS.gs.SMT.txt").write_text("1\n2\n")  # scores whose sentences are not published
    folder = tmp_path / "STS" / "STSBenchmark"
    folder.mkdir()
    for split in ("train", "dev", "test"):
        folder.joinpath(f"sts-{split}.csv").write_text('g\tf\ty\t1\t4.2\tA "cat\tB\tlicence\ng\tf\ty\t2\t1.0\tC\tD\n')
    folder = tmp_path / "SICK"
    folder.mkdir()
    for name in ("SICK_train.txt", "SICK_trial.txt", "SICK_test_annotated.txt"):
        folder.joinpath(name).write_text(
            "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tj\n1\tA\tB\t4.5\tNEUTRAL\n2\tC\tD\t1.0\tNEUTRAL\n"
        )
    return tmp_path


def test_loading(sts_dir):
    pairs = load_task(sts_dir, "STS13")
    assert pairs.first == ["a cat", '"quoted', "b dog", "x\x85y"]
    assert pairs.scores == [5.0, 1.5, 4.0, 0.0]
    assert load_task(sts_dir / "STS", "STSBenchmark", "dev") == (['A "cat', "C"], ["B", "D"], [4.2, 1.0])
    assert load_task(sts_dir, "SICKRelatedness").scores == [4.5, 1.0]


def test_scores_are_over_all_subsets_together(sts_dir):
    rng = np.random.default_rng(0)
    vectors = {}

    def encode(sentences):
        assert len(set(sentences)) == len(sentences)
        return np.array([vectors.setdefault(s, rng.normal(size=5)) for s in sentences])

    got = evaluate_sts(encode, load_tasks(sts_dir))
    assert list(got) == list(TASKS)
    pairs = load_task(sts_dir, "STS12")
    cosines = [
        np.dot(vectors[a], vectors[b]) / np.linalg.norm(vectors[a]) / np.linalg.norm(vectors[b])
        for a, b in zip(pairs.first, pairs.second, strict=True)
    ]
    assert got["STS12"] == pytest.approx(spearmanr(cosines, pairs.scores).statistic)


def test_table():
    assert format_table({"STS12": 0.71234, "STSBenchmark": 0.8}).splitlines() == [
        "| STS12 | STSBenchmark |  Avg. |",
        "| ----- | ------------ | ----- |",
        "| 71.23 |    80.00     | 75.62 |",
    ]


def test_bad_data(sts_dir):
    bench = sts_dir / "STS" / "STSBenchmark"
    for path, content, message in [
        (bench / "sts-dev.csv", "a\tb\n", "line 1: 2 tab-separated columns are too few"),
        (bench / "sts-dev.csv", "g\tf\ty\t1\t1.0\tA\tB\ng\tf\ty\t2\thigh\tA\tB\n", "line 2: 'high' is not a score"),
        (bench / "sts-dev.csv", "", "holds no scored pair"),
    ]:
        path.write_text(content)
        with pytest.raises(FastpromptError, match=message):
            load_task(sts_dir, "STSBenchmark", "dev")
    bench.joinpath("sts-dev.csv").unlink()
    with pytest.raises(
        FastpromptError, match="STSBenchmark: .*sts-dev.csv is missing; give the folder that SentEval"
    ):
        load_task(sts_dir, "STSBenchmark", "dev")
    with pytest.raises(FastpromptError, match="STS99"):
        load_task(sts_dir, "STS99")
    with pytest.raises(FastpromptError, match="has only a test split"):
        load_task(sts_dir, "STS12", "dev")
    (sts_dir / "STS" / "STS16-en-test" / "STS.gs.two.txt").write_text("4.0\nhigh\n")
    with pytest.raises(FastpromptError, match="STS.gs.two.txt, line 2: 'high' is not a score"):
        load_task(sts_dir, "STS16")
    (sts_dir / "STS" / "STS12-en-test" / "STS.gs.two.txt").write_text("4.0\n")
    with pytest.raises(FastpromptError, match="has 2 lines and STS.gs.two.txt 1"):
        load_task(sts_dir, "STS12")
    with pytest.raises(FastpromptError, match="STS13: .* is missing"):
        load_task(sts_dir / "SICK", "STS13")


# Published on MTEB for this checkpoint with mean pooling.
MTEB = {"STS12": 72.37, "STS13": 80.60, "STS14": 75.59, "STS15": 85.39, "STS16": 78.99, "STSBenchmark": 82.03}


def test_mean_pooling_reproduces_the_published_figures(data_dir):
    encoder = PromptEncoder.from_pretrained(PACKAGED_MODEL, reconcile(PACKAGED_MODEL, {"pooling": "mean"}))
    scores = evaluate_sts(encoder.encode, load_tasks(data_dir / "senteval", tuple(MTEB)))
    assert {task: 100 * score for task, score in scores.items()} == pytest.approx(MTEB, abs=0.02)


def test_untrained_mask_score(data_dir):
    """Before training the [MASK] state is a poor embedding; the delta alone repairs much of it."""
    pairs = load_task(data_dir / "senteval", "STSBenchmark")
    scores = {}
    for delta in (False, True):
        config = reconcile(PACKAGED_MODEL, {"delta": delta, "final_period": False})
        scores[delta] = 100 * sts_score(PromptEncoder.from_pretrained(PACKAGED_MODEL, config).encode, pairs)
    assert scores[False] == pytest.approx(38.5, abs=0.1)
    assert scores[True] > 65


@pytest.fixture
def unit():
    return unit_rows(np.random.default_rng(1).normal(size=(300, 8)) + 0.3)


def test_geometry_by_definition(unit):
    n = len(unit)
    distances = ((unit[:, None] - unit[None]) ** 2).sum(-1)
    off = ~np.eye(n, dtype=bool)
    assert uniformity(unit) == pytest.approx(np.log(np.exp(-2 * distances[off]).mean()), rel=1e-9)
    assert anisotropy(unit) == pytest.approx((unit @ unit.T)[off].mean(), rel=1e-9)
    assert alignment(unit[:10], unit[10:20]) == pytest.approx(distances[np.arange(10), np.arange(10, 20)].mean())


def test_neighbour_ranks_by_definition(unit):
    first, second = np.arange(20), np.arange(20, 40)
    cosines = unit @ unit.T
    expected = [
        1 + sum(cosines[a, j] > cosines[a, b] for j in range(300) if j not in (a, b))
        for a, b in zip(first, second, strict=True)
    ]
    assert neighbour_ranks(unit, first, second).tolist() == expected
    order, values = nearest(unit, unit[:3], 2)
    assert order[:, 0].tolist() == [0, 1, 2]
    assert np.allclose(values[:, 0], 1)


def test_neighbours_of_a_perfect_and_a_blind_encoder():
    pairs = [(f"a{i}", f"b{i}") for i in range(30)]
    perfect = evaluate_neighbours(lambda s: np.array([np.eye(30)[int(t[1:])] for t in s]), pairs)
    assert (perfect["mrr"], perfect["recall_at_10"], perfect["alignment"]) == (1.0, 1.0, 0.0)
    blind = evaluate_neighbours(lambda s: np.ones((len(s), 4)), pairs)
    assert blind["recall_at_10"] == 0.0  # ties count against
    assert blind["anisotropy"] == pytest.approx(1.0)


def test_zero_rows_stay_zero():
    assert np.array_equal(unit_rows(np.array([[0.0, 0.0], [3.0, 4.0]])), [[0, 0], [0.6, 0.8]])


def test_pairs_file(tmp_path):
    path = tmp_path / "p.tsv"
    path.write_text("a\tb\nc\tc\n")
    assert load_pairs(str(path)) == [("a", "b")]  # a sentence is no neighbour of itself
    path.write_text("c\tc\n")
    with pytest.raises(FastpromptError, match="every pair is a sentence and itself"):
        load_pairs(str(path))
    path.write_text("a\n")
    with pytest.raises(FastpromptError, match="two columns of sentences"):
        load_pairs(str(path))
