"""Adapters through the SDK and the command line, as a user meets them."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import changed_copy
from comparing import GREEDY, assert_eq, cold
from streaming import live_state
from tiny_adapters import write_adapter

from mlserve import (
    LLM,
    AdapterError,
    AdapterLimitError,
    AdapterNotFoundError,
    ConfigError,
    RequestOptions,
    SamplingParams,
)
from mlserve.cli import main
from mlserve.config import AdapterConfig, DType
from mlserve.engine.build import lora_dtype

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 64}
PROMPT = list(range(1, 13))
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters: one, two, and one that can't be read."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two"), 1):
        write_adapter(root / name, tiny_model_dir, seed)
    shutil.copytree(root / "one", root / "broken")
    (root / "broken" / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    return root


@pytest.fixture
def llm(tiny_model_dir: Path, folder: Path) -> Iterator[LLM]:
    llm = LLM(str(tiny_model_dir), adapter_dir=str(folder), **OPTIONS)
    yield llm
    assert not any(live_state(llm.engine).values()), live_state(llm.engine)
    assert all(info.num_leases == 0 for info in llm.list_adapters())
    llm.engine.cache.check()
    llm.engine.scheduler.slots.check()


def test_a_directory_is_read_on_first_use(llm: LLM, tiny_model_dir: Path, folder: Path) -> None:
    assert llm.list_adapters() == []
    outputs = llm.generate([PROMPT] * 3, GREEDY, adapter=["one", None, "two"])
    for output, name in zip(outputs, ("one", None, "two"), strict=True):
        assert_eq(output, cold(tiny_model_dir, PROMPT, adapter=None if name is None else folder / name))
    assert [info.name for info in llm.list_adapters()] == ["one", "two"]
    (info, _) = llm.list_adapters()
    assert (info.rank, info.is_loaded, info.path) == (4, True, folder / "one")


def test_one_name_for_all(llm: LLM, tiny_model_dir: Path, folder: Path) -> None:
    for output in llm.generate([PROMPT, PROMPT], GREEDY, adapter="two"):
        assert_eq(output, cold(tiny_model_dir, PROMPT, adapter=folder / "two"))


@pytest.mark.parametrize("way", ["chat", "stream"])
def test_other_ways_to_ask(llm: LLM, way: str) -> None:
    def ask(adapter: str | None) -> list[int]:
        if way == "chat":
            return llm.chat(MESSAGES, GREEDY, adapter=adapter)[0].outputs[0].token_ids
        return [token for output in llm.stream(MESSAGES, GREEDY, adapter=adapter) for token in output.token_ids]

    answers = [ask(name) for name in (None, "one", "two", None)]
    assert answers[0] == answers[3]
    assert len({tuple(answer) for answer in answers}) == 3


def test_an_adapter_for_each_prompt_or_one(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="1 adapter for 2 prompts: give one, or one for each prompt"):
        llm.generate([PROMPT, PROMPT], GREEDY, adapter=["one"])


@pytest.mark.parametrize("name", ["three", "../one", "", "one/", ".", "x" * 300])
def test_unknown_names(llm: LLM, name: str) -> None:
    with pytest.raises(AdapterNotFoundError):
        llm.generate(PROMPT, GREEDY, adapter=name)


def test_unknown_names_say_which_prompt_and_what_is_near(llm: LLM) -> None:
    llm.generate(PROMPT, GREEDY, adapter="one")
    with pytest.raises(AdapterNotFoundError, match=r"prompt 1: .*'on'.*one"):
        llm.generate([PROMPT] * 2, GREEDY, adapter=["one", "on"])


def test_an_adapter_that_can_not_be_read_fails_its_request_only(llm: LLM, tiny_model_dir: Path) -> None:
    broken, base = llm.generate([PROMPT] * 2, GREEDY, adapter=["broken", None])
    assert broken.error is not None
    assert "broken" in broken.error
    assert broken.outputs[0].finish_reason == "error"
    assert_eq(base, cold(tiny_model_dir, PROMPT))


def test_load_reload_unload(llm: LLM, tiny_model_dir: Path, folder: Path) -> None:
    info = llm.load_adapter("mine", folder / "one", pinned=True)
    assert (info.name, info.is_pinned, info.num_leases) == ("mine", True, 0)
    assert_eq(llm.generate(PROMPT, GREEDY, adapter="mine")[0], cold(tiny_model_dir, PROMPT, adapter=folder / "one"))
    assert llm.load_adapter("mine", folder / "two").digest != info.digest
    assert_eq(llm.generate(PROMPT, GREEDY, adapter="mine")[0], cold(tiny_model_dir, PROMPT, adapter=folder / "two"))
    assert llm.load_adapter("mine").path == folder / "two"
    llm.unload_adapter("mine")
    with pytest.raises(AdapterNotFoundError, match="mine"):
        llm.unload_adapter("mine")
    with pytest.raises(AdapterNotFoundError, match="mine"):
        llm.generate(PROMPT, GREEDY, adapter="mine")


def test_unloading_while_it_runs(llm: LLM, tiny_model_dir: Path, folder: Path) -> None:
    llm.load_adapter("mine", folder / "one")
    stream = llm.stream(PROMPT, GREEDY, adapter="mine")
    got = [next(stream)]
    llm.unload_adapter("mine")
    llm.load_adapter("mine", folder / "two")
    got += list(stream)
    completed = got[-1].completed
    assert completed is not None
    assert_eq(completed, cold(tiny_model_dir, PROMPT, adapter=folder / "one"))


def test_bad_adapters_at_the_start(tiny_model_dir: Path, folder: Path) -> None:
    with pytest.raises(AdapterError, match="broken"):
        LLM(str(tiny_model_dir), adapters={"fine": folder / "one", "bad": folder / "broken"}, **OPTIONS)
    with pytest.raises(ConfigError, match="adapter_dir is 'nowhere', which is no folder"):
        LLM(str(tiny_model_dir), adapter_dir="nowhere", **OPTIONS)
    with pytest.raises(ConfigError, match="max_loras is 0: give a number above 0"):
        LLM(str(tiny_model_dir), max_loras=0, **OPTIONS)


def test_slots_in_fewer_bits_hold_rounded_adapters(tiny_model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """An adapter in slots of bfloat16 answers as one of rounded weights does in slots of float32."""
    rounded = changed_copy(
        folder / "one", tmp_path / "one", change=lambda file: {key: t.bfloat16().float() for key, t in file.items()}
    )
    narrow = LLM(str(tiny_model_dir), adapters={"one": folder / "one"}, lora_dtype="bfloat16", **OPTIONS)
    wide = LLM(str(tiny_model_dir), adapters={"one": folder / "one", "rounded": rounded}, **OPTIONS)
    (output,) = narrow.generate(PROMPT, GREEDY, adapter="one")
    expected, exact = wide.generate([PROMPT] * 2, GREEDY, adapter=["rounded", "one"])
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.outputs[0].logprobs == expected.outputs[0].logprobs
    assert output.outputs[0].logprobs != exact.outputs[0].logprobs
    (bits16, bits32) = (llm.engine.runner.adapters.num_bytes for llm in (narrow, wide))
    assert 2 * bits16 == bits32


def test_slots_on_a_gpu_store_adapters_as_weights_are_stored() -> None:
    gpu = torch.device("cuda")
    assert lora_dtype(AdapterConfig(), torch.bfloat16, gpu) == torch.bfloat16
    assert lora_dtype(AdapterConfig(lora_dtype=DType.FLOAT16), torch.float16, gpu) == torch.float16
    with pytest.raises(ConfigError, match="lora_dtype is float32 and weights are stored in bfloat16: on a GPU"):
        lora_dtype(AdapterConfig(lora_dtype=DType.FLOAT32), torch.bfloat16, gpu)
    with pytest.raises(ConfigError, match="lora_dtype is 'int8': give one of float32, bfloat16, float16"):
        LLM(lora_dtype="int8")


def test_rank_and_memory_limits(tiny_model_dir: Path, folder: Path) -> None:
    llm = LLM(str(tiny_model_dir), max_lora_rank=3, **OPTIONS)
    with pytest.raises(AdapterLimitError, match=r"rank 4 .*limit 3: raise max_lora_rank"):
        llm.load_adapter("one", folder / "one")
    llm = LLM(str(tiny_model_dir), max_adapter_memory=1e-6, **OPTIONS)
    with pytest.raises(AdapterLimitError, match="max_adapter_memory"):
        llm.load_adapter("one", folder / "one")
    llm = LLM(str(tiny_model_dir), max_adapter_bytes=100, **OPTIONS)
    with pytest.raises(AdapterLimitError, match="max_adapter_bytes"):
        llm.load_adapter("one", folder / "one")


def test_host_memory_for_one_adapter_at_a_time(tiny_model_dir: Path, folder: Path) -> None:
    """More names than fit: each is read again when it is asked for."""
    one = LLM(str(tiny_model_dir), **OPTIONS).load_adapter("one", folder / "one")
    assert one.num_bytes is not None
    llm = LLM(
        str(tiny_model_dir), adapter_dir=str(folder), max_adapter_memory=1.5 * one.num_bytes / 2**30, max_loras=1,
        **OPTIONS,
    )  # fmt: skip
    names = ["one", "two", "one", None, "two", "one"]
    outputs = llm.generate([PROMPT] * 6, GREEDY, adapter=names)
    for output, name in zip(outputs, names, strict=True):
        assert_eq(output, cold(tiny_model_dir, PROMPT, adapter=None if name is None else folder / name))
    assert sum(info.is_loaded for info in llm.list_adapters()) == 1


@pytest.mark.parametrize("caching", [True, False])
def test_prompt_logprobs_and_n(llm: LLM, tiny_model_dir: Path, folder: Path, caching: bool) -> None:
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=1, n=2, temperature=1.0, seed=5)
    llm = LLM(str(tiny_model_dir), adapters={"a": folder / "one"}, enable_prefix_caching=caching, **OPTIONS)
    assert_eq(
        llm.generate(PROMPT, params, adapter="a")[0], cold(tiny_model_dir, PROMPT, params, adapter=folder / "one")
    )


def test_options_of_a_request_have_defaults() -> None:
    assert RequestOptions() == RequestOptions(adapter=None, priority=0, cache_salt=None, tenant=None)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        status = main([*arguments, "--model", str(tiny_model_dir)])
        return status, *capsys.readouterr()

    return call


def test_command_generate(run: Run, tiny_model_dir: Path, folder: Path) -> None:
    text = cold(tiny_model_dir, list(b"hello"), adapter=folder / "one").outputs[0].text
    common = ("generate", "hello", "--max-tokens", "8", "--num-blocks", "64")
    assert run(*common, "--adapters", f"mine={folder / 'one'}", "--adapter", "mine")[1] == f"{text}\n"
    assert run(*common, "--adapter-dir", str(folder), "--adapter", "one")[1] == f"{text}\n"
    status, _, error = run(*common, "--adapter", "mine")
    assert status == 1
    assert error.startswith("mlserve: ")
    assert "'mine'" in error
    with pytest.raises(SystemExit):
        run(*common, "--adapters", "no-path")


def test_command_inspect(run: Run, folder: Path) -> None:
    status, printed, _ = run("adapters", "inspect", str(folder / "one"))
    assert status == 0
    assert "rank         4" in printed
    assert "targets      q_proj, k_proj, v_proj, o_proj (layers 0-1)" in printed
    assert "served       yes" in printed
    _, printed, _ = run("adapters", "inspect", str(folder / "one"), "--max-lora-rank", "2")
    assert "served       no" in printed
    assert "limit 2: raise max_lora_rank" in printed


def test_command_chat_switches_adapters(run: Run, llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "hello\n/new\n/adapter one\nhello\n/adapter nobody\nhello\n/adapter\n/new\nhello\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    status, printed, _ = run("chat", "--adapter-dir", str(folder), "--max-tokens", "8", "--num-blocks", "64")
    assert status == 0
    texts = [llm.chat(MESSAGES, GREEDY, adapter=name)[0].outputs[0].text for name in (None, "one")]
    assert printed.count(texts[0]) == 2
    assert printed.count(texts[1]) == 1
    assert "nobody" in printed
