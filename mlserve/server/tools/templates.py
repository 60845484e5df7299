"""What a chat template does with tools, read from its source."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import lru_cache

import jinja2

from mlserve.errors import PromptError
from mlserve.server.tools.formats import FORMATS, ToolFormat

__all__ = ["TemplateUse", "detect_format", "template_use"]

# What a template shows of its model's calls, by format; the first that is found counts. Comments don't count.
_SIGNS = {
    "mistral": re.compile(r"\[TOOL_CALLS\]"),
    "hermes": re.compile(r"<tool_call>"),
    "pythonic": re.compile(r"\[\w*func\w*\("),  # [func_name1(params_name1=...)]: how Meta and Google describe it
    "llama3_json": re.compile(r"<\|python_tag\|>|\"name\": .*\"parameters\": "),
}
# Calls of other families that bear one of these signs: arguments in tags of their own.
_OTHER_FORMS = re.compile(r"<function=|<arg_key>|<parameter=")
_TOOL_VARIABLES = ("tools", "xml_tools")  # the second one is SmolLM3's


@dataclass(frozen=True, slots=True)
class TemplateUse:
    """tools: the variable in which it takes tools; None if it takes none. calls: whether it lays out earlier calls."""

    tools: str | None
    calls: bool


@lru_cache(maxsize=16)
def template_use(chat_template: str) -> TemplateUse:
    """Look at the names that the template's expressions use. Raises `PromptError` if it can't be read."""
    tokens = [(kind, value) for kind, value in _tokens(chat_template) if kind != "whitespace"]
    pairs = list(itertools.pairwise(tokens))
    variables = {name for before, (kind, name) in pairs if kind == "name" and before != ("operator", ".")}
    keys = {name for before, (kind, name) in pairs if kind == "name" and before == ("operator", ".")}
    keys |= {text[1:-1] for kind, text in tokens if kind == "string"}
    return TemplateUse(
        tools=next((name for name in _TOOL_VARIABLES if name in variables), None), calls="tool_calls" in keys
    )


def detect_format(chat_template: str | None) -> ToolFormat | None:
    """The form of calls that the template shows; None if it takes no tools, or shows a form that isn't read here.

    The model's architecture says nothing about this: SmolLM2 is a Llama, and writes calls as Qwen does.
    """
    if chat_template is None or template_use(chat_template).tools is None:
        return None
    text = "".join(value for kind, value in _tokens(chat_template) if kind != "comment")
    text = text.replace('\\"', '"')  # within strings
    if _OTHER_FORMS.search(text):
        return None
    return next((FORMATS[name] for name, sign in _SIGNS.items() if sign.search(text)), None)


def _tokens(chat_template: str) -> list[tuple[str, str]]:
    try:
        return [(kind, value) for _, kind, value in jinja2.Environment().lex(chat_template)]
    except jinja2.TemplateSyntaxError as error:
        raise PromptError(
            f"the chat template has an error in line {error.lineno} ({error.message}): correct the template"
        ) from error
