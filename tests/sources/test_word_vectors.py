"""sources._words and the command line on word vectors: rows, resuming, labels by word, faults."""

from __future__ import annotations

import gzip
import shlex
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast.cli.rows import suffix_of
from splince_fast.exceptions import InputError
from splince_fast.sources import from_word_vectors
from splince_fast.sources._words import WordFile, write_words

pytest.importorskip("polars")
pytestmark = pytest.mark.filterwarnings("error")

Matrix = NDArray[np.float32]
Cli = Callable[..., str]
N, WIDTH = 60, 5
ODD = 'nan null NaN " "" a,b \\ \' é 日本 12'
WORDS = ["", "\u00a0", "\u0085", *ODD.split(), *(f"word{i}" for i in range(N - 15)), "\u3000"]


def text(words: list[str], X: Matrix, header: bool = False, end: str = "\n") -> bytes:
    lines = [" ".join([word, *map(str, row)]) for word, row in zip(words, X, strict=True)]
    return "".join(line + end for line in [f"{len(X)} {X.shape[1]}"] * header + lines).encode()


def binary(words: list[str], X: Matrix, feed: bytes = b"") -> bytes:
    """word2vec writes a line feed after each vector, and gensim does not."""
    pairs = zip(words, X.astype("<f4"), strict=True)
    rows = [word.encode() + b" " + row.tobytes() + feed for word, row in pairs]
    return f"{len(X)} {X.shape[1]}\n".encode() + b"".join(rows)


# Name of a file in each format, and its naive writer.
FORMATS: dict[str, Callable[[list[str], Matrix], bytes]] = {
    "glove.6B.txt": text,
    "no-last-end.txt": lambda words, X: text(words, X)[:-1],
    "header.txt": lambda words, X: text(words, X, header=True),
    "fasttext.vec": lambda words, X: text(words, X, header=True, end=" \n"),
    "windows.vec": lambda words, X: text(words, X, header=True, end="\r\n"),
    "gensim.bin": binary,
    "word2vec.bin": lambda words, X: binary(words, X, b"\n"),
    "glove.6B.txt.gz": lambda words, X: gzip.compress(text(words, X)),
    "fasttext.vec.gz": lambda words, X: gzip.compress(text(words, X, header=True, end=" \n")),
    "gensim.bin.gz": lambda words, X: gzip.compress(binary(words, X)),
}


def assert_same_bits(found: Matrix, expected: Matrix) -> None:
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.fixture
def cli(told: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command line in a new folder."""
    monkeypatch.chdir(tmp_path)
    return lambda line, code=0: told(*shlex.split(line), code=code)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows_and_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = np.random.default_rng(0).normal(size=(N, WIDTH)).astype(np.float32)
    paths = [tmp_path / f"{i}{name}" for i in range(2)]
    for path, rows in zip(paths, (slice(0, 37), slice(37, N)), strict=True):
        path.write_bytes(FORMATS[name](WORDS[rows], X[rows]))
    labels = {"z": dict(zip(WORDS, range(N), strict=True)), "u": {"word0": 0.5}}
    source = from_word_vectors(paths, labels, block_rows=10)
    n = None if name.startswith(("glove", "no")) else N  # without a header the number is unknown
    assert (source.n_rows, source.n_features, source.nbytes) == (n, WIDTH, n and X.nbytes)
    assert source.files == tuple(map(str, paths))
    bounds = [0, 10, 20, 30, 37, 47, 57, N]
    parsed, parse = [], WordFile.parse
    monkeypatch.setattr(WordFile, "parse", lambda *a: (parsed.append(len(a[2])), parse(*a))[1])
    for first in range(len(bounds)):
        parsed.clear()
        blocks = list(source.iter_from(first))
        assert parsed == np.diff(bounds[first:]).tolist()  # earlier rows are not parsed
        for block, start in zip(blocks, bounds[first:], strict=False):
            assert_same_bits(block.X, X[start : start + len(block.X)])
            assert block.labels["z"] == list(range(start, start + len(block.X)))
    with pytest.raises(InputError, match="only 7 blocks"):
        list(source.iter_from(8))


words = st.text(st.characters(codec="utf-8", exclude_characters=" \n"), max_size=5)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", ["glove.6B.txt", "fasttext.vec", "gensim.bin"])
@given(rows=st.lists(st.tuples(words, floats, floats), min_size=1, max_size=9))
def test_written_words_and_vectors_are_read_again_to_the_bit(
    name: str, rows: list[tuple[str, float, float]], tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("words") / name
    names, X = [row[0] for row in rows], np.array([row[1:] for row in rows], np.float32)
    path.write_bytes(FORMATS[name](names, X))
    write_words(path, [(names, X)], WordFile(str(path)), compressed=False)
    ((found, again),) = WordFile(str(path)).end_blocks()
    assert found == names
    assert_same_bits(again, X)


def test_gensim_reads_and_writes_the_same_files(cli: Cli) -> None:
    models = pytest.importorskip("gensim.models", reason="gensim is not installed")
    X = np.random.default_rng(0).normal(size=(N, WIDTH)).astype(np.float32)
    vectors = models.KeyedVectors(WIDTH)
    vectors.add_vectors(WORDS[12:-1], X[12:-1])  # gensim strips the space of other alphabets
    eraser = sf.leace(sf.Moments().update(X, {"z": np.arange(N) % 2}), erase="z")
    eraser.save("e")
    for name, is_binary in (("a.vec", False), ("a.bin", True), ("a.bin.gz", True)):
        vectors.save_word2vec_format(name, binary=is_binary)
        ((found, rows),) = WordFile(name).end_blocks()
        assert found == vectors.index_to_key
        assert_same_bits(rows, vectors.vectors)
        cli(f"apply e {name} -o clean-{name}")
        clean = models.KeyedVectors.load_word2vec_format(f"clean-{name}", binary=is_binary)
        assert clean.index_to_key == vectors.index_to_key
        assert_same_bits(clean.vectors, eraser(vectors.vectors))


GOOD = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
ROWS = binary(["a", "b", "c"], GOOD)
# Name of a file, its content, and the place and the cause in the error.
FAULTS = {
    "empty": ("x.txt", b"", "line 1 .*empty"),
    "no header": ("x.vec", b"a 1 2\nb 3 4\n", "line 1 .*the header 'n d'"),
    "wrong header": ("x.vec", b"3 two\na 1 2\n", "line 1 .*the header 'n d'"),
    "more rows in the header": ("x.vec", b"3 2\na 1 2\nb 3 4\n", "2 rows, and 3 in its header"),
    "another width": ("x.txt", b"a 1 2\nb 3 4\nc 5\n", "line 3 .*of 2 fields"),
    "a word with spaces": ("x.txt", b"a 1 2\n. . 3 4\nc 5 6\n", "line 2 .*of 4 fields"),
    "an empty line": ("x.txt", b"a 1 2\n\nb 3 4\n", "line 2 "),
    "NaN": ("x.txt", b"a 1 2\nb nan 4\n", "line 2 .*'b nan 4"),
    "no number": ("x.vec", b"2 2\na 1 2\nb 3 four\n", "line 3 .*'b 3 four"),
    "beyond float32": ("x.txt", b"a 1 2\nb 3 -1e39\n", "line 2 .*finite"),
    "no UTF-8": ("x.txt", b"a 1 2\n" + 99 * b"\xff" + b" 3 4\n", "line 2 .*UTF-8"),
    "truncated text": ("x.vec.gz", gzip.compress(b"2 2\na 1 2\nb 3 4\n")[:-9], "cannot be read"),
    "no gzip": ("x.txt.gz", b"a 1 2\n", "cannot be read"),
    "truncated in a vector": ("x.bin", ROWS[:-3], "row 2 .*truncated"),
    "truncated after a row": ("x.bin", ROWS[:-10], "2 rows, and 3 in its header"),
    "NaN in binary": ("x.bin", ROWS.replace(GOOD[1, 1:].tobytes(), 4 * b"\xff"), "row 1 .*finite"),
    "no UTF-8 in binary": ("x.bin", ROWS.replace(b"b ", b"\xff "), "row 1 .*UTF-8"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_file_is_refused_with_its_line(fault: str, cli: Cli) -> None:
    name, content, cause = FAULTS[fault]
    Path(name).write_bytes(content)
    with pytest.raises(InputError, match=cause) as error:
        list(from_word_vectors(name))
    assert repr(name) in str(error.value)
    assert len(str(error.value)) <= 240
    sf.leace(sf.Moments().update(GOOD, {"z": [0, 1, 1]}), erase="z").save("e")
    assert name in cli(f"apply e {name} -o out{name[1:]}", 2)
    assert sorted(path.name for path in Path().iterdir()) == ["e", name]


@pytest.fixture
def files(cli: Cli) -> Matrix:
    X = np.random.default_rng(0).normal(size=(N, WIDTH)).astype(np.float32)
    for name, make in FORMATS.items():
        Path(name).write_bytes(make(WORDS, X))
    Path("late.vec").write_bytes(text(WORDS[20:], X[20:], header=True))
    np.save("late.npy", X[20:])
    rows = [",".join(map(str, row)) for row in zip(WORDS, *LABELS.values(), strict=True)][20:]
    lines = [f"word,{','.join(LABELS)}", *rows[::-1], "absent,f,1,0.5"]
    Path("labels.csv").write_text("\n".join(lines))
    Path("rows.csv").write_text("\n".join(line.partition(",")[2] for line in [lines[0], *rows]))
    return X


LABELS: dict[str, list[Any]] = {
    "gender": [None] * 20 + ["fm"[i % 2] for i in range(20, N)],
    "job": [None] * 20 + [i % 3 % 2 for i in range(20, N)],
    "age": [None] * 20 + [i / 7 for i in range(20, N)],
}


@pytest.mark.parametrize("name", FORMATS)
def test_one_command_erases_a_file_in_its_own_format(files: Matrix, cli: Cli, name: str) -> None:
    moments = sf.Moments().update(files, LABELS)  # words without labels count for Cov(x)
    expected = sf.splince(moments, erase=["gender", "age"], keep="job")
    cli(f"fit {name} --labels labels.csv --erase gender --erase age --keep job -o e")
    eraser = sf.Projection.load("e")
    np.testing.assert_allclose(eraser.matrix(), expected.matrix(), atol=1e-12)
    target = f"out{suffix_of(name)}"
    assert cli(f"apply e {name} -o {target}") == f"{N} rows: {target}\n"
    assert (Path(target).read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    assert WordFile(target).n_rows == WordFile(name).n_rows
    ((found, X),) = WordFile(target).end_blocks()
    assert found == WORDS
    assert_same_bits(X, eraser(files))
    assert "finished before" in cli(f"apply e {name} -o {target} --resume")
    sf.leace(moments, erase="gender").save("other")
    assert "exists" in cli(f"apply other {name} -o {target} --resume", 2)


def test_words_with_labels_are_compared_and_erased_with_them(files: Matrix, cli: Cli) -> None:
    options = "--erase gender --keep job --seeds 2 --eraser none --eraser LEACE --head retrained"
    by_word = cli(f"compare glove.6B.txt --labels labels.csv {options}")
    assert by_word == cli(f"compare late.npy --labels rows.csv {options}")
    cli("fit late.vec --labels labels.csv --erase gender --method oracle -o e")
    cli("apply e late.vec --labels labels.csv -o out.vec")
    expected = sf.load_eraser("e")(files[20:], {"gender": LABELS["gender"][20:]})
    assert_same_bits(WordFile("out.vec").end_blocks()[0][1], expected)


def test_mistakes(files: Matrix, cli: Cli) -> None:
    sf.leace(sf.Moments().update(files, LABELS), erase="gender").save("e")
    Path("twice.csv").write_text("word,gender\nb,f\na,m\nb,m\n")
    for line, cause in (
        ("fit glove.6B.txt --erase gender -o f", "one --labels FILE"),
        ("fit glove.6B.txt --labels rows.csv --erase gender -o f", "'word'"),
        ("fit glove.6B.txt --labels twice.csv --erase gender -o f", "'b' in lines 2 and 4"),
        ("fit glove.6B.txt late.npy --labels labels.csv --erase gender -o f", "different formats"),
        ("apply e glove.6B.txt -o out.npy", "only as .txt, .txt.gz"),
        ("apply e glove.6B.txt --in-place", "--in-place is for .npy"),
    ):
        assert cause in cli(line, 2), line
    assert cli("apply e . -o ../clean").count("rows: ") == 1  # a folder has no word vectors
    Path("folder").mkdir()
    Path("glove.6B.txt").rename("folder/glove.6B.txt")
    assert ".txt" not in cli("apply e folder -o ../clean", 2)
    Path("folder/glove.6B.txt").rename("glove.6B.txt")
    with pytest.raises(InputError, match=r"frame\.to_dict"):
        from_word_vectors("glove.6B.txt", {"z": ["m"]})  # type: ignore[dict-item]
    Path("wide.txt").write_bytes(text(["a"], np.ones((1, 6), np.float32)))
    with pytest.raises(InputError, match=r"6 numbers per word .* has 5"):
        from_word_vectors(["glove.6B.txt", "wide.txt"])


def test_apply_needs_memory_for_a_block_only(cli: Cli) -> None:
    X = np.random.default_rng(0).normal(size=(45_000, 50)).astype(np.float32)  # 9 MB; a block, 0.8
    Path("X.bin").write_bytes(binary(["w"] * len(X), X))
    sf.leace(sf.Moments().update(X, {"z": np.arange(len(X)) % 2}), erase="z").save("e")

    def peak(job: Callable[[], Any]) -> int:
        tracemalloc.start()
        return (job(), tracemalloc.get_traced_memory()[1], tracemalloc.stop())[1]

    assert peak(lambda: cli("apply e X.bin -o out.bin")) < 8e6
    assert peak(lambda: list(from_word_vectors("X.bin"))) > 9e6  # control: all rows


def test_the_professions_of_a_text_file(real_data: Callable[[str], Path], cli: Cli) -> None:
    folder = real_data("professions_word2vec")
    X, z, y = (np.load(folder / f"{name}.npy") for name in ("X", "z_stereotype", "y_fact"))
    names = (folder / "professions.txt").read_text().split()
    Path("vectors.txt").write_bytes(text(names, X))
    scores = map("\n{},{!r},{!r}".format, names, z.tolist(), y.tolist())
    Path("scores.csv").write_text("".join(["word,stereotype,fact", *scores]))
    cli("fit vectors.txt --labels scores.csv --erase stereotype --keep fact --shrinkage oas -o e")
    cli("apply e vectors.txt -o clean.txt")
    expected, _ = sf.erase(X, concept=z, keep=y, shrinkage="oas")
    ((found, clean),) = WordFile("clean.txt").end_blocks()
    assert found == names
    # Both results are rounded once to float32: an ulp of the largest number.
    np.testing.assert_allclose(clean, expected, rtol=0, atol=np.spacing(np.abs(X).max()))
    covariances = [np.abs((z - z.mean()) @ rows.astype(np.float64)).max() for rows in (X, clean)]
    assert covariances[1] < 1e-5 * covariances[0]  # control: the concept was there
