"""What templates show of how their models call tools."""

from __future__ import annotations

import pytest
from tool_templates import LLAMA, MISTRAL, PLAIN, PYTHONIC, QWEN, QWEN_CODER, SMOLLM3

from mlserve.config import EMBEDDED_MODEL
from mlserve.engine.tokenizer import load_tokenizer
from mlserve.errors import ConfigError, PromptError
from mlserve.model.sources import find_model
from mlserve.server.tools.formats import FORMATS, format_named
from mlserve.server.tools.templates import TemplateUse, detect_format, template_use


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, "hermes"),
        (SMOLLM3, "hermes"),
        (LLAMA, "llama3_json"),
        (PYTHONIC, "pythonic"),
        (MISTRAL, "mistral"),
        (PLAIN, None),
        (QWEN_CODER, None),
        (None, None),
        ("{{ tools }}", None),
        ("{{ messages }}<tool_call>", None),  # it takes no tools
        ("{{ tools }}{# <tool_call> #}", None),
    ],
)
def test_detection(template: str | None, expected: str | None) -> None:
    found = detect_format(template)
    assert (found and found.name) == expected


@pytest.mark.parametrize(
    ("template", "tools", "calls"),
    [
        (QWEN, "tools", True),
        (LLAMA, "tools", True),
        (MISTRAL, "tools", True),
        (SMOLLM3, "xml_tools", False),
        (PLAIN, None, False),
        ("You may use tools. {# tools #}{{ 'tools' }}{{ message.tools }}", None, False),
        ("{{ message['tool_calls'] }}{% if tools %}{% endif %}", "tools", True),
        ("{% generation %}{{ message.tool_calls }}{% endgeneration %}", None, True),
    ],
)
def test_use(template: str, tools: str | None, calls: bool) -> None:
    assert template_use(template) == TemplateUse(tools, calls)


def test_the_embedded_models_template_takes_no_tools() -> None:
    template = load_tokenizer(find_model(EMBEDDED_MODEL)).chat_template
    assert template is not None
    assert template_use(template) == TemplateUse(None, False)
    assert detect_format(template) is None


def test_a_template_that_cannot_be_read() -> None:
    with pytest.raises(PromptError, match="the chat template has an error in line 2"):
        detect_format("\n{{ 'open")


def test_formats_by_name() -> None:
    assert all(format_named(name) is form and form.name == name for name, form in FORMATS.items())
    with pytest.raises(ConfigError, match="no tool-call format 'xml': use one of hermes, llama3_json, "):
        format_named("xml")


def test_markers_name_every_literal_of_a_form() -> None:
    assert all(form.opener in form.markers for form in FORMATS.values())
    assert FORMATS["hermes"].markers == ("<tool_call>", "</tool_call>")
