"""Text as tokens come: whole characters, stop strings over token edges, and the same text whatever the chunks."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny import EOS, IM_END
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from vocabularies import sentence_piece_fields, write_gguf

from mlserve.engine.detokenize import IncrementalDetokenizer
from mlserve.engine.tokenizer import Tokenizer, load_tokenizer
from mlserve.engine.tokenizer_parts import TokenizerParts
from mlserve.request import SamplingParams

PIECES = ("ABC", "DEF", "G", "HI", "J!", "X", "aa", "ab", "b", "end", " ", "é")


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    """A vocabulary of the strings in `PIECES`, in order."""
    spelled = {piece.replace(" ", "Ġ").replace("é", "Ã©"): i for i, piece in enumerate(PIECES)}
    backend = Backend(models.BPE(vocab=spelled, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(TokenizerParts(backend, {}, (), None))


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("gguf") / "spm.gguf", sentence_piece_fields()))


def stream(tokenizer: Tokenizer, ids: list[int], chunk: int = 1, **params: Any) -> tuple[list[str], str | None]:
    """Deltas, the last from `finish`, and the stop string; nothing follows one, as in the engine."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params))
    deltas = []
    for start in range(0, len(ids), chunk):
        deltas.append(detokenizer.append(ids[start : start + chunk]))
        if detokenizer.stop_string is not None:
            break
    deltas.append(detokenizer.finish())
    return deltas, detokenizer.stop_string


def ids_of(*texts: str) -> list[int]:
    return [PIECES.index(text) for text in texts]


def first_stop(texts: list[str], stops: list[str], min_tokens: int) -> tuple[int, str] | None:
    """The slow oracle: of all stop strings, the one complete first; (end in the text, stop string)."""
    owner = [n for n, text in enumerate(texts, start=1) for _ in text]  # how many tokens there are with each character
    whole = "".join(texts)
    for end in range(1, len(whole) + 1):
        ending = [stop for stop in stops if whole[:end].endswith(stop)]
        if ending and owner[end - 1] >= min_tokens:
            return end, max(ending, key=len)
    return None


# Characters


CHARACTERS = {
    "two bytes": "ď",
    "four bytes": "🌶",
    "joined family": "👨‍👩‍👧‍👦",
    "letter after": "🌶a",
    "mixed": "a é\u200d中🏳️‍🌈 z",
}


@pytest.mark.parametrize("text", CHARACTERS.values(), ids=CHARACTERS.keys())
def test_case_4_02_no_half_characters(tokenizer: Tokenizer, text: str) -> None:
    deltas, _ = stream(tokenizer, list(text.encode()))
    assert "".join(deltas) == text
    assert [delta for delta in deltas if delta] == list(text)  # each character as soon as its last byte is there


def test_case_4_02_cut_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = list("a🌶".encode())[:-1]
    assert stream(tokenizer, ids)[0] == ["a", "", "", "", "\ufffd"]
    assert tokenizer.decode(ids) == "a\ufffd"


@given(ids=st.lists(st.one_of(st.integers(0, 262), st.sampled_from([*"é🌶".encode(), EOS])), max_size=30),
       chunk=st.integers(1, 6), skip=st.booleans())  # fmt: skip
@example(ids=[0xF0, 0x9F, IM_END, 0x8C, 0xB6], chunk=1, skip=True)  # a special token amid a character
@example(ids=[0xF0, 0x9F, IM_END, 0x8C, 0xB6], chunk=1, skip=False)
@example(ids=[0xED, 0xA0, 0x80], chunk=1, skip=True)  # a surrogate
def test_streamed_bytes_are_the_whole_text(tokenizer: Tokenizer, ids: list[int], chunk: int, skip: bool) -> None:
    deltas, _ = stream(tokenizer, ids, chunk, skip_special_tokens=skip)
    backend: Any = tokenizer._backend
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas) == backend.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30))
def test_streamed_text_holds_no_replacement_characters(tokenizer: Tokenizer, text: str) -> None:
    deltas, _ = stream(tokenizer, list(text.encode()))
    assert "".join(deltas) == text
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


def test_the_output_goes_on_from_the_prompt(sentence_piece: Tokenizer) -> None:
    """Decoding a whole text drops the space that encoding put before it; an output's first space is its own."""
    ids = sentence_piece.encode("the hello é", add_special_tokens=False)
    assert "".join(stream(sentence_piece, ids)[0]) == " the hello é"
    assert sentence_piece.decode(ids) == "the hello é"


def test_special_tokens_are_shown_if_asked_for(tokenizer: Tokenizer) -> None:
    ids = [ord("a"), IM_END, ord("b")]
    assert "".join(stream(tokenizer, ids)[0]) == "ab"
    assert "".join(stream(tokenizer, ids, skip_special_tokens=False)[0]) == "a<|im_end|>b"


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert "".join(stream(tokenizer, [ord("a"), 5000, ord("b")])[0]) == "ab"


# Stop strings


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_case_4_01_stop_string_over_token_edges(pieces: Tokenizer, chunk: int) -> None:
    found = stream(pieces, ids_of("ABC", "DEF", "G", "HI", "J!"), chunk, stop="DEFGHIJ")
    assert ("".join(found[0]), found[1]) == ("ABC", "DEFGHIJ")


def test_case_4_01_what_only_began_like_a_stop_string_is_given_out(pieces: Tokenizer) -> None:
    deltas, stop = stream(pieces, ids_of("ABC", "DEF", "G", "X"), stop="DEFGHIJ")
    assert deltas == ["ABC", "", "", "DEFGX", ""]
    assert stop is None


def test_what_is_held_back_at_the_end_is_flushed(pieces: Tokenizer) -> None:
    assert stream(pieces, ids_of("ABC", "DEF"), stop="DEFGHIJ") == (["ABC", "", "DEF"], None)


def test_only_what_may_begin_a_stop_string_is_held_back(pieces: Tokenizer) -> None:
    deltas, stop = stream(pieces, ids_of("aa", "aa", "ab", "b"), stop="aab")
    assert deltas == ["", "aa", "a", ""]
    assert stop == "aab"


def test_the_stop_string_is_kept_if_asked_for(pieces: Tokenizer) -> None:
    found = stream(pieces, ids_of("ABC", "DEF", "G", "HI", "J!"), stop="FGH", include_stop_str_in_output=True)
    assert ("".join(found[0]), found[1]) == ("ABCDEFGH", "FGH")


def test_the_stop_string_that_is_complete_first_counts(pieces: Tokenizer) -> None:
    """Not the one that begins first: 'ABCDEX' may never come."""
    deltas, stop = stream(pieces, ids_of("ABC", "DEF"), chunk=2, stop=["ABCDEF", "CD"])
    assert ("".join(deltas), stop) == ("AB", "CD")


def test_of_those_complete_at_once_the_longest_counts(pieces: Tokenizer) -> None:
    for stops in (["CD", "BCD", "D"], ["D", "BCD", "CD"]):
        deltas, stop = stream(pieces, ids_of("ABC", "DEF"), stop=stops)
        assert ("".join(deltas), stop) == ("A", "BCD")


def test_nothing_comes_after_a_stop_string(pieces: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(pieces, SamplingParams(stop="C"))
    assert detokenizer.append(ids_of("ABC", "DEF")) == "AB"
    assert detokenizer.append(ids_of("X")) == ""
    assert detokenizer.finish() == ""


def test_a_stop_string_in_special_tokens_needs_them_shown(tokenizer: Tokenizer) -> None:
    ids = [ord("a"), IM_END, ord("b")]
    assert stream(tokenizer, ids, stop="<|im_end|>")[1] is None
    assert stream(tokenizer, ids, stop="<|im_end|>", skip_special_tokens=False) == (["a", "", ""], "<|im_end|>")


def test_a_stop_string_of_several_bytes_per_character(tokenizer: Tokenizer) -> None:
    deltas, stop = stream(tokenizer, list("x🌶🌶é".encode()), stop="🌶é")
    assert ("".join(deltas), stop) == ("x🌶", "🌶é")


def test_replacement_characters_at_the_end_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, [ord("a"), 0xF0], stop="\ufffd") == (["a", "", ""], "\ufffd")


@pytest.mark.parametrize(
    ("min_tokens", "text", "stop"),
    [
        (0, "", "ABC"),
        (1, "", "ABC"),
        (2, "ABCDEF", "ABC"),  # the first is too early, the second isn't
        (3, "ABCDEF", "ABC"),
        (4, "ABCDEFABCG", None),
    ],
)
def test_no_stop_string_before_min_tokens(pieces: Tokenizer, min_tokens: int, text: str, stop: str | None) -> None:
    found = stream(pieces, ids_of("ABC", "DEF", "ABC", "G"), stop="ABC", min_tokens=min_tokens)
    assert ("".join(found[0]), found[1]) == (text, stop)


def test_a_stop_string_may_begin_before_min_tokens(pieces: Tokenizer) -> None:
    found = stream(pieces, ids_of("ABC", "DEF", "G"), stop="CD", min_tokens=2)
    assert ("".join(found[0]), found[1]) == ("AB", "CD")


@given(
    script=st.lists(st.sampled_from(range(len(PIECES))), max_size=12),
    stops=st.lists(st.text("aABbend G", min_size=1, max_size=5), max_size=4),
    chunk=st.integers(1, 5),
    min_tokens=st.integers(0, 5),
    keep=st.booleans(),
)
def test_stop_strings_against_an_oracle(
    pieces: Tokenizer, script: list[int], stops: list[str], chunk: int, min_tokens: int, keep: bool
) -> None:
    deltas, stop = stream(pieces, script, chunk, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=keep)
    texts = [PIECES[i] for i in script]
    expected = first_stop(texts, stops, min_tokens)
    whole = "".join(texts)
    if expected is None:
        assert ("".join(deltas), stop) == (whole, None)
    else:
        end, found = expected
        assert ("".join(deltas), stop) == (whole[: end if keep else end - len(found)], found)


@pytest.mark.parametrize("min_tokens", [0, 4, 7])
@pytest.mark.parametrize("stop", ["aba", "aabaaa", "aabaaab", "abaaba", "aaaa"])
def test_stop_strings_that_overlap_themselves(tokenizer: Tokenizer, stop: str, min_tokens: int) -> None:
    """Every text of ten letters a and b."""
    for bits in range(2**10):
        text = "".join("ab"[bits >> i & 1] for i in range(10))
        deltas, found = stream(tokenizer, list(text.encode()), stop=stop, min_tokens=min_tokens)
        expected = first_stop(list(text), [stop], min_tokens)
        end = len(text) if expected is None else expected[0] - len(stop)
        assert ("".join(deltas), found is None) == (text[:end], expected is None)


# Cost


def test_cost_doesnt_grow_with_the_text(tokenizer: Tokenizer) -> None:
    """Nor do bytes that never become a character, or a stop string that is always almost there, pile up work."""

    def seconds(count: int, ids: list[int], **params: Any) -> float:
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params))
        start = time.process_time()
        for i in range(count):
            detokenizer.append([ids[i % len(ids)]])
        return time.process_time() - start

    for ids, params in (([65], {}), ([0xFF], {}), ([65], {"stop": ["A" * 900 + "B"] * 4}), ([0xF0, 0x9F], {})):
        seconds(100, ids, **params)
        assert seconds(20_000, ids, **params) < 40 * seconds(2_000, ids, **params) + 0.05
