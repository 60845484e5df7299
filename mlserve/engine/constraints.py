"""Constraints as grammars over the model's own tokens, by way of llguidance.

A grammar works on bytes, and so do our tokens: the library gets the bytes of each, whichever kind of vocabulary they
come from. What it takes for the end is a token that no model has, behind the last: where it may come, those may that
end a sequence.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from mlserve.constraint import Constraint, ConstraintKind
from mlserve.engine.tokenizer import Tokenizer
from mlserve.errors import SamplingParamsError

__all__ = ["CompiledConstraint", "ConstraintCompiler", "GrammarMatcher"]

MAX_CACHED = 64  # compiled grammars kept, each of up to a few megabytes
MAX_REASON = 300  # characters of the library's that go into an error
# Of JSON: a space, or a new line with its indentation. Without a bound models get lost in white space.
WHITE_SPACE = r" |\n[ \t]{0,32}"
# The parser's time for a step grows with the square of these in an ambiguous grammar: 2,000 take 0.8 s, 500 0.02 s.
# Only Lark grammars can be ambiguous. JSON needs four for each optional property of an object; 8,000 take 0.02 s.
MAX_LARK_ITEMS, MAX_ITEMS = 500, 5000
STEP_FUEL = 100_000  # of the lexer, for one mask: 7 ms
MAX_LEXER_STATES = 25_000  # 0.5 to 2 kB each


class ConstraintCompiler:
    """Makes grammars of constraints. Thread-safe: a server compiles in a worker thread what the engine will need.

    What was compiled is kept for as long as somebody holds it, and the last `MAX_CACHED` beyond that.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's; the tokenizer's may be another. Nothing is built before the first constraint."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._live: WeakValueDictionary[Constraint, CompiledConstraint] = WeakValueDictionary()
        self._recent: OrderedDict[Constraint, CompiledConstraint] = OrderedDict()

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """The grammar of a constraint, compiled unless it is known: milliseconds, or up to half a second for a schema
        of the largest size.

        Raises `SamplingParamsError` if the constraint isn't one that is served, with the library's reason.
        """
        with self._lock:
            if self._vocabulary is None:  # 0.3 s for 49k tokens
                self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            vocabulary, known = self._vocabulary, self._live.get(constraint)
        compiled = known or _compile(constraint, vocabulary)  # not under the lock: the engine's thread may want it
        with self._lock:
            compiled = self._live.setdefault(constraint, compiled)
            self._recent[constraint] = compiled
            self._recent.move_to_end(constraint)
            if len(self._recent) > MAX_CACHED:
                self._recent.popitem(last=False)
        return compiled


class CompiledConstraint:
    """A grammar from which any number of sequences can start."""

    __slots__ = ("__weakref__", "_start", "_vocabulary")

    def __init__(self, start: LLMatcher, vocabulary: _Vocabulary) -> None:
        self._start = start
        self._vocabulary = vocabulary

    def matcher(self, *, may_end: bool = True) -> GrammarMatcher:
        """A new sequence's place in it. Without `may_end` the sequence goes on as long as the grammar lets it."""
        return GrammarMatcher(self._start.deep_copy(), self._vocabulary, may_end)


class GrammarMatcher:
    """See `TokenMatcher`."""

    __slots__ = ("_matcher", "error", "masks", "may_end")

    def __init__(self, matcher: LLMatcher, masks: _Vocabulary, may_end: bool) -> None:
        self._matcher = matcher
        self.masks = masks
        self.may_end = may_end
        self.error: str | None = None

    @property
    def is_complete(self) -> bool:
        """See `TokenMatcher`."""
        return bool(self._matcher.is_stopped())

    def advance(self, token_id: int) -> None:
        """See `TokenMatcher`."""
        if not self._matcher.consume_token(token_id):
            self.check()

    def check(self) -> None:
        """Set `error` if the library's matcher has failed; it stays failed then."""
        if self._matcher.is_error():
            self.error = f"the answer can't follow its constraint any further: {_reason(self._matcher)}"

    @property
    def handle(self) -> LLMatcher:
        """The library's matcher."""
        return self._matcher


class _Vocabulary:
    """The library's view of the model's tokens. See `MaskWriter`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._end = max(vocab_size, tokenizer.vocab_size)  # the library's token for the end
        self.num_words = self._end // 32 + 1
        eos = [token for token in eos_token_ids if token < self._end]  # a config may name tokens that don't exist
        self._eos_words = np.array([token // 32 for token in eos], np.intp)
        self._eos_bits = np.array([1 << token % 32 for token in eos], np.uint32)
        self.tokenizer = LLTokenizer(_TokenizerAdapter(tokenizer, self._end))
        self._executor = LLExecutor()

    def write(self, matchers: Sequence[GrammarMatcher], masks: np.ndarray) -> None:
        """See `MaskWriter`."""
        fill_next_token_bitmask_par(self._executor, [(m.handle, row) for row, m in enumerate(matchers)], masks)
        words = masks.view(np.uint32)
        end_word, end_bit = self._end // 32, np.uint32(1 << self._end % 32)
        may_end = words[:, end_word] & end_bit != 0
        words[:, end_word] &= ~end_bit
        for row, matcher in enumerate(matchers):
            matcher.check()
            if may_end[row] and matcher.may_end:
                np.bitwise_or.at(words[row], self._eos_words, self._eos_bits)

    def only_ends(self, matcher: LLMatcher) -> bool:
        """Whether nothing may follow but the end. False for a matcher that fails."""
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return not matcher.is_error() and int(np.bitwise_count(mask).sum()) == 1 and bool(mask[self._end // 8])


class _TokenizerAdapter:
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.eos_token_id = end
        self.tokens = [*map(tokenizer.token_bytes, range(end)), b""]  # ids without a token have no bytes
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text in the middle of another: with nothing before it, and no special tokens."""
        return self._tokenizer.encode_pieces([0, text])[1:]


def _compile(constraint: Constraint, vocabulary: _Vocabulary) -> CompiledConstraint:
    kind = constraint.kind
    limits = LLParserLimits(
        max_items_in_row=MAX_LARK_ITEMS if kind is ConstraintKind.GRAMMAR else MAX_ITEMS,
        step_lexer_fuel=STEP_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    try:
        grammar = _grammar(constraint)
    except ValueError as error:  # JSON that Python reads and the library doesn't: lone surrogates, huge numbers
        raise SamplingParamsError(f"the constraint {kind} isn't served: {error}") from None
    start = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
    _check(kind, start)
    if vocabulary.only_ends(start):
        raise SamplingParamsError(f"the constraint {kind} allows the empty answer only: give one that allows a text")
    _check(kind, start)  # its first mask finds what compiling doesn't
    beginning = start.deep_copy()
    forced = beginning.compute_ff_bytes().split(b"\xff")[0]  # `{` of an object; 0xFF stands before special tokens
    beginning.consume_tokens(vocabulary.tokenizer.tokenize_bytes(forced))
    beginning.compute_bitmask()
    _check(kind, beginning)
    return CompiledConstraint(start, vocabulary)


def _check(kind: ConstraintKind, matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise SamplingParamsError(f"the constraint {kind} isn't served: {_reason(matcher)}")


def _grammar(constraint: Constraint) -> str:
    """In the library's notation. Raises `ValueError` for a schema that isn't JSON to the library."""
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _json_grammar('{"type":"object"}')
        case ConstraintKind.JSON_SCHEMA:
            return _json_grammar(constraint.source)
        case ConstraintKind.REGEX:
            return str(LLMatcher.grammar_from_regex(constraint.source))
        case ConstraintKind.CHOICE:
            choices = json.loads(constraint.source)
            return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        case ConstraintKind.GRAMMAR:
            return constraint.source


def _json_grammar(schema: str) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITE_SPACE}))


def _reason(matcher: LLMatcher) -> str:
    """The library's, without its state and in one line."""
    reason = " ".join(str(matcher.get_error()).split("\n<")[0].split())
    return reason if len(reason) <= MAX_REASON else f"{reason[: MAX_REASON - 3]}..."
