# SPDX-License-Identifier: Apache-2.0
"""Every format, and every kind of bad row with its line numbers."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastprompt.data.reading import RowReader
from fastprompt.errors import FastpromptError


def read(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    reader = RowReader(path)
    return list(reader), reader


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.txt", "One.\nTwo, with a comma.\n", [("One.",), ("Two, with a comma.",)]),
        ("bom.txt", b"\xef\xbb\xbfOne.\r\nTwo.\r\n", [("One.",), ("Two.",)]),
        ("lines.txt", "One\u2028still one.\nTwo\x0cstill two.\n", [("One\u2028still one.",), ("Two\x0cstill two.",)]),
        ("one.csv", 'sentence\n"Yes, quoted."\nNo\n', [("Yes, quoted.",), ("No",)]),
        ("two.csv", "A,B\nC,D\n", [("A", "B"), ("C", "D")]),
        ("head.csv", "sent0,sent1,hard_neg\nA,B,C\n", [("A", "B", "C")]),
        ("multi.csv", '"Two\nlines",B\nC,D\n', [("Two\nlines", "B"), ("C", "D")]),
        ("pair.tsv", '"Oh" he said.\tB\nC\tD "quoted"\n', [('"Oh" he said.', "B"), ("C", 'D "quoted"')]),
        ("head.tsv", "premise\thypothesis\nA\tB\n", [("A", "B")]),
        ("order.csv", "id,hard_neg,sent0,sent1\n7,N,A,P\n8,M,B,Q\n", [("A", "P", "N"), ("B", "Q", "M")]),
        ("score.tsv", "sentence1\tsentence2\tscore\nA\tB\t4.5\nC\tD\t1\n", [("A", "B"), ("C", "D")]),
        ("texts.jsonl", '"One."\n"Two."\n', [("One.",), ("Two.",)]),
        ("lists.jsonl", '["A", "B"]\n["C", "D"]\n', [("A", "B"), ("C", "D")]),
        (
            "named.jsonl",
            '{"id": "7", "negative": "N", "anchor": "A", "positive": "P"}\n{"anchor": "B", "positive": "Q", "negative": "M"}\n',
            [("A", "P", "N"), ("B", "Q", "M")],
        ),
    ],
)
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_formats(tmp_path, name, content, rows, zipped):
    data = content if isinstance(content, bytes) else content.encode()
    got, reader = read(tmp_path, name + ".gz", gzip.compress(data)) if zipped else read(tmp_path, name, data)
    assert got == rows
    assert reader.columns == len(rows[0])
    assert reader.report.rows == len(rows)
    assert not reader.report.bad


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_parquet(tmp_path, zipped):
    table = pa.table({"id": [1, 2, 3], "sent1": ["B", "D", None], "sent0": ["A", "C", "E"]})
    path = tmp_path / "t.parquet"
    pq.write_table(table, path)
    if zipped:
        content, path = path.read_bytes(), tmp_path / "t.parquet.gz"
        path.write_bytes(gzip.compress(content))
    reader = RowReader(path)
    assert list(reader) == [("A", "B"), ("C", "D")]
    assert str(reader.report) == "2 usable rows; 1 skipped: empty (line 3)"


def test_bad_rows_are_counted_with_their_first_lines(tmp_path):
    content = b"Good.\n\nAlso good.\nbad \xff byte\n   \n" + b"\n" * 7
    rows, reader = read(tmp_path, "bad.txt", content)
    assert rows == [("Good.",), ("Also good.",)]
    assert str(reader.report) == (
        "2 usable rows; 9 skipped: empty (lines 2, 5, 6, 7, 8, …); 1 skipped: not UTF-8 (line 4)"
    )


def test_rows_of_another_width(tmp_path):
    rows, reader = read(tmp_path, "bad.csv", "A,B\nonly one\nC,D,E\nF,\nG,H\n")
    assert rows == [("A", "B"), ("G", "H")]
    assert str(reader.report) == "2 usable rows; 2 skipped: not 2 columns (lines 2, 3); 1 skipped: empty (line 4)"


def test_a_null_in_the_first_row_does_not_drop_the_column(tmp_path):
    rows, reader = read(
        tmp_path,
        "n.jsonl",
        '{"id": 1}\n{"sent0": "A", "sent1": "B", "hard_neg": null}\n{"sent0": "C", "sent1": "D", "hard_neg": "E"}\n',
    )
    assert rows == [("C", "D", "E")]
    assert str(reader.report) == "1 usable rows; 2 skipped: not text (lines 1, 2)"


def test_half_a_character_spelt_out_in_json(tmp_path):
    rows, reader = read(tmp_path, "h.jsonl", '"good"\n"bad \\ud83d"\n"\\ud83d\\udc4d"\n')
    assert rows == [("good",), ("\U0001f44d",)]
    assert "1 skipped: not UTF-8 (line 2)" in str(reader.report)


def test_parquet_oddities(tmp_path):
    """Dictionary-encoded text, and bytes that are not UTF-8 in a string column."""
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"text": pa.array(["A", "B", "A"]).dictionary_encode()}), path)
    assert list(RowReader(path)) == [("A",), ("B",), ("A",)]
    broken = pa.array([b"good", b"bad \xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": broken}), path)
    reader = RowReader(path)
    assert list(reader) == [("good",)]
    assert "1 skipped: not UTF-8 (line 2)" in str(reader.report)
    pq.write_table(pa.table({"text": [f"sentence {n}" for n in range(3000)]}), path, compression="snappy")
    content = bytearray(path.read_bytes())
    content[60:600] = b"\xff" * 540
    path.write_bytes(content)
    with pytest.raises(FastpromptError, match="damaged parquet file"):
        list(RowReader(path))


def test_bad_json_lines(tmp_path):
    rows, reader = read(tmp_path, "bad.jsonl", '"A"\n{broken\n7\n"B"\n')
    assert rows == [("A",), ("B",)]
    assert "1 skipped: not JSON (line 2)" in str(reader.report)
    assert "1 skipped: not text (line 3)" in str(reader.report)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", "", "no usable row.*nothing to train on"),
        ("blank.txt", "\n  \n\n", "no usable row.*nothing to train on"),
        ("bytes.txt", b"\xff\xfe\n\xff\n", r"no usable row \(0 usable rows; 2 skipped: not UTF-8 \(lines 1, 2\)\)"),
        ("wide.csv", "a,b,c,d\n", "4 columns; one .* two .* or three"),
        ("x.doc", "text", r"unknown kind of file; the name must end in one of \.txt"),
        ("cut.txt.gz", gzip.compress(b"hello\n" * 10000)[:-30], "damaged gzip file"),
        ("not.txt.gz", "plain text", "damaged gzip file"),
        ("not.parquet", "plain text", "damaged parquet file"),
        ("lone.jsonl", '{"query": "A", "negative": "B"}\n', "lack the positive; name the columns sent0"),
        ("twice.csv", "text,sentence\nA,B\n", "'text' and 'sentence' may both be the sentence"),
        ("many.jsonl", '{"a": "1", "b": "2", "c": "3", "d": "4"}\n', "cannot tell which of the columns"),
    ],
)
def test_unusable_files(tmp_path, name, content, message):
    with pytest.raises(FastpromptError, match=message):
        read(tmp_path, name, content)


def test_missing_file(tmp_path):
    with pytest.raises(FastpromptError, match=r"absent\.txt: no such file"):
        RowReader(tmp_path / "absent.txt")
