"""The text of the character model: alphabet, split and files that cannot serve."""

import hashlib

import pytest
import torch

from harness.workloads.corpus import read_corpus
from harness.workloads.registry import make_workload


def write(tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def decoded(corpus, symbols):
    alphabet = corpus.alphabet + "?"
    return "".join(alphabet[int(s)] for s in symbols)


def test_rare_characters_share_one_symbol(tmp_path):
    text = "abc\n" * 50 + "\u00e9\U0001f600" + "abc\n" * 50
    corpus = read_corpus(write(tmp_path, text), num_characters=None)
    assert corpus.alphabet == "\nabc"
    assert corpus.num_symbols == 5
    whole = torch.cat([corpus.train, corpus.held_out])
    assert decoded(corpus, whole) == text.replace("\u00e9", "?").replace("\U0001f600", "?")


def test_without_rare_characters_there_is_no_symbol_for_them(tmp_path):
    corpus = read_corpus(write(tmp_path, "abab" * 100), num_characters=None)
    assert corpus.num_symbols == 2


def test_last_tenth_is_held_out_and_the_hash_covers_what_is_used(tmp_path):
    text = "0123456789" * 100
    corpus = read_corpus(write(tmp_path, text), num_characters=500)
    assert (len(corpus.train), len(corpus.held_out)) == (450, 50)
    assert corpus.sha256 == hashlib.sha256(text[:500].encode()).hexdigest()


def test_bytes_that_are_not_utf8_are_read_as_one_character(tmp_path):
    corpus = read_corpus(write(tmp_path, b"ab\xff" * 100), num_characters=None)
    assert corpus.alphabet == "ab\ufffd"


def test_standard_library_is_long_enough_and_the_same_each_time():
    corpus = read_corpus(None, num_characters=2_000_000)
    assert len(corpus.train) == 1_800_000
    assert corpus.sha256 == read_corpus(None, num_characters=2_000_000).sha256
    assert set("import def\n") <= set(corpus.alphabet)


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "is empty"), ("abc" * 20, "too short")],
)
def test_useless_texts_are_refused(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        make_workload({"kind": "char_gpt", "text": write(tmp_path, text)})


def test_missing_text_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"workload\.text=.*nowhere.*No such file"):
        make_workload({"kind": "char_gpt", "text": str(tmp_path / "nowhere")})


def test_short_text_gives_the_held_out_windows_that_fit(tmp_path):
    path = write(tmp_path, "hello world\n" * 60)
    workload = make_workload({"kind": "char_gpt", "text": path, "context": 8, "num_held_out": 1000})
    held_out = workload.held_out(0)
    assert sum(len(symbols) for symbols, _ in held_out) == 72 - 8
    symbols, targets = next(workload.batches(0, 1))
    assert torch.equal(symbols[:, 1:], targets[:, :-1])
    assert workload.settings["text"] == "text.txt"


def test_vocabulary_smaller_than_the_alphabet_is_refused(tmp_path):
    path = write(tmp_path, "hello world\n" * 200)
    with pytest.raises(ValueError, match=r"workload\.vocabulary_size=3 .*9 "):
        make_workload({"kind": "char_gpt", "text": path, "vocabulary_size": 3})
