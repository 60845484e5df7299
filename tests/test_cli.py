"""The command line on the tiny model."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from comparing import cold
from tree import run_python

from mlserve import LLM, CacheConfig, ModelOptions, SamplingParams, SchedulerConfig, __version__
from mlserve.cli import CHAT_DEFAULTS, SAMPLING_FLAGS, main

# Plain torch: nothing is built, and nothing is said about that.
PLAIN = ("--kernels", "reference")
SMALL = (*PLAIN, "--block-size", "4", "--num-blocks", "64", "--max-tokens", "8")


def text_of(model: Path, prompt: str, **params: Any) -> str:
    output = cold(model, list(prompt.encode()), SamplingParams(max_tokens=8, **params), kernels="reference")
    return output.outputs[0].text


def test_generate_one_prompt(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hello", "--model", str(tiny_model_dir), *SMALL]) == 0
    printed = capsys.readouterr()
    assert printed.out == text_of(tiny_model_dir, "Hello") + "\n"
    assert printed.err == ""


def test_generate_several_prompts(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from standard input"))
    assert main(["generate", "Hello", "-", "--model", str(tiny_model_dir), *SMALL]) == 0
    prompts = ("Hello", "from standard input")
    assert capsys.readouterr().out == "".join(f"--- {p}\n{text_of(tiny_model_dir, p)}\n" for p in prompts)


def test_flags_reach_sampling_and_engine(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[LLM] = []
    build = LLM.__init__

    def spy(self: LLM, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        seen.append(self)

    monkeypatch.setattr(LLM, "__init__", spy)
    flags = "--temperature 0.9 --seed 5 --top-k 40 --no-enable-prefix-caching --dtype bfloat16 --policy priority"
    assert main(["generate", "Hello", "--model", str(tiny_model_dir), *SMALL, *flags.split()]) == 0
    sampled = text_of(tiny_model_dir, "Hello", temperature=0.9, seed=5, top_k=40)
    assert sampled != text_of(tiny_model_dir, "Hello")
    config = seen[0].config
    assert (config.cache.block_size, config.cache.num_blocks, config.cache.enable_prefix_caching) == (4, 64, False)
    assert (config.model.dtype, config.scheduler.policy) == ("bfloat16", "priority")
    capsys.readouterr()
    assert main(["generate", "Hello", "--model", str(tiny_model_dir), *SMALL, *flags.split()[:6]]) == 0
    assert capsys.readouterr().out == sampled + "\n"


def test_inspect(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_model_dir), "--block-size", "4", "--num-blocks", "31", *PLAIN]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{tiny_model_dir}\n")
    assert re.search(r"KV per token +512 bytes in float32\n", printed)
    assert re.search(r"KV capacity +124 tokens, ", printed)


def chat(monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path, typed: str, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return main(["chat", "--model", str(tiny_model_dir), *SMALL, *flags])


def answers(printed: str) -> list[tuple[int, int]]:
    """Cached and all prompt tokens of each answer."""
    found = re.findall(
        r"\n\[(\d+) of (\d+) prompt tokens cached, first token \d+\.\d\d s, 8 tokens at \d+\.\d tokens/s\]\n", printed
    )
    return [(int(cached), int(total)) for cached, total in found]


def test_chat_keeps_its_history(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat(monkeypatch, tiny_model_dir, "Hello?\n\nAnd then?\n/new\nHello?\n/quit\nnever read\n") == 0
    printed = capsys.readouterr().out
    keys = "/adapter NAME switches, /new starts afresh, /quit ends."
    assert printed.startswith(f"{tiny_model_dir}: type a message; {keys}\n> ")
    llm = LLM(str(tiny_model_dir), kernels="reference")
    (first,) = llm.chat([{"role": "user", "content": "Hello?"}], SamplingParams(max_tokens=8))
    assert printed.count(first.outputs[0].text) == 2
    (cold_cached, total), (cached, longer), again = answers(printed)
    assert (cold_cached, total) == (0, first.metrics.prompt_tokens)
    assert cached >= total - 4  # the history: all full blocks of the first prompt, and of what was answered
    assert longer > total + 8
    assert again == ((total - 1) // 4 * 4, total)


def test_chat_with_a_system_message(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat(monkeypatch, tiny_model_dir, "Hi\n/new\nHi\n", "--system", "Be brief.") == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (expected,) = LLM(str(tiny_model_dir), kernels="reference").chat(messages, SamplingParams(max_tokens=8))
    printed = capsys.readouterr().out
    assert printed.count(expected.outputs[0].text) == 2
    assert [total for _, total in answers(printed)] == [expected.metrics.prompt_tokens] * 2


def test_chat_streams(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is written and flushed before the next step of the engine."""
    events: list[str] = []
    stdout = io.StringIO()
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setattr(stdout, "flush", lambda: events.append("flush"))
    step = LLM._pump
    monkeypatch.setattr(LLM, "_pump", lambda self: events.append("step") or step(self))
    assert chat(monkeypatch, tiny_model_dir, "Hello?\n") == 0
    assert [e for e in events if e == "step"] == ["step"] * 8
    between = re.findall("s(f*)", "".join(event[0] for event in events))
    assert all(between)


def test_chat_goes_on_after_a_refusal_and_a_failure(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * 600
    assert chat(monkeypatch, tiny_model_dir, f"{long}\nHello?\n", "--max-model-len", "200") == 0
    printed = capsys.readouterr().out
    assert "> the prompt has 6" in printed
    assert len(answers(printed)) == 1  # the refused message isn't in the history

    def fails(self: Any, plan: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr("mlserve.model.runner.ModelRunner.run", fails)
    assert chat(monkeypatch, tiny_model_dir, "Hello?\n") == 0
    printed = capsys.readouterr().out
    assert "the model raised RuntimeError while it ran this request: boom" in printed
    assert not answers(printed)


def test_an_interrupted_answer_does_not_end_the_chat(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = LLM._pump, iter(range(100))

    def interrupted(self: LLM) -> Any:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(LLM, "_pump", interrupted)
    assert chat(monkeypatch, tiny_model_dir, "Hello?\nHello?\n") == 0
    printed = capsys.readouterr().out
    assert printed.count("[stopped]") == 1
    assert len(answers(printed)) == 1


@pytest.mark.parametrize("command", ["generate", "chat", "inspect"])
def test_help_shows_every_option_with_its_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    options = [option for part in (ModelOptions, CacheConfig, SchedulerConfig) for option in fields(part)]
    if command == "inspect":
        options = [option for option in options if option.name != "model"]
    else:
        options += [option for option in fields(SamplingParams) if option.name in SAMPLING_FLAGS]
    for option in options:
        flag = "--" + option.name.replace("_", "-")
        assert f" {flag}" in shown
        assert option.metadata.get("help", "") in shown
        if option.default is not None:
            after = re.split(rf" {flag}[ ,] ?", shown)[-1].removeprefix(f"--no-{flag[2:]}")
            default = CHAT_DEFAULTS.get(option.name, option.default) if command == "chat" else option.default
            assert f"(default: {default})" in after.split(" --", 1)[0], option.name


def test_sampling_flags_are_sampling_parameters() -> None:
    assert {*SAMPLING_FLAGS} <= {option.name for option in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "Hello", "--model", "{missing}"], "there is no model at"),
        (["inspect", "{missing}"], "there is no model at"),
        (["generate", "", "--model", "{tiny}"], "the prompt is empty: give at least one token"),
        (["generate", "a", "--temperature", "-1", "--model", "{tiny}"], "temperature is -1.0: give"),
        (["generate", "a", "--min-tokens", "9", "--max-tokens", "3", "--model", "{tiny}"], "min_tokens 9 is above"),
        (["generate", "a", "--block-size", "0", "--model", "{tiny}"], "block_size is 0: give a number above 0"),
        (["chat", "--kernels", "magic", "--model", "{tiny}"], "kernels is 'magic'"),
        (["generate", "a" * 600, "--model", "{tiny}"], "the prompt has 600 tokens, the model takes 512"),
    ],
)
def test_errors_are_one_line_and_exit_status_1(
    arguments: list[str], message: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [a.format(missing=tmp_path / "gone.gguf", tiny=tiny_model_dir) for a in arguments]
    assert main([*given[:1], *PLAIN, *given[1:]]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("mlserve: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_request_that_fails_is_an_error(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, plan: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr("mlserve.model.runner.ModelRunner.run", fails)
    assert main(["generate", "Hello", "--model", str(tiny_model_dir), *SMALL]) == 1
    assert capsys.readouterr().err.endswith("mlserve: the model raised RuntimeError while it ran this request: boom\n")


def test_an_interrupt_exits_with_130(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, plan: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("mlserve.model.runner.ModelRunner.run", interrupted)
    assert main(["generate", "Hello", "--model", str(tiny_model_dir), *SMALL]) == 130
    assert capsys.readouterr().err == "\n"


@pytest.mark.parametrize("arguments", [["generate"], ["fly"], [], ["generate", "a", "--blok-size", "4"]])
def test_misuse_is_explained_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: mlserve" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--dtype", "--lora-dtype"])
def test_a_wrong_choice_is_told_what_there_is(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "a", flag, "int8"])
    told = capsys.readouterr().err.replace("'", "")
    assert f"{flag}: invalid choice: int8 (choose from float32, bfloat16, float16)" in told


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("mlserve")
    result = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == __version__
    code = "import sys, mlserve.cli; sys.argv = ['mlserve', '--version']\ntry: mlserve.cli.main()\nfinally: "
    assert run_python(code + "print('torch' in sys.modules)").stdout.split() == [__version__, "False"]
