"""Public bug reports about LoRA adapters, each on the tiny model. What reading alone answers is in tests/adapters."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import WEIGHTS, changed_copy
from comparing import GREEDY, assert_eq, cold
from engines import make_engine, step, submit
from fake_adapters import FakeRegistry, fake_adapter
from fakes import ContextRunner
from tiny_adapters import ALL, load_peft, write_adapter

from mlserve import LLM, AdapterError, AdapterNotFoundError, RequestOptions, RequestOutput, SamplingParams
from mlserve.engine.tokenizer import Tokenizer

PROMPT = list(range(1, 13))
OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 256}

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def make(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """AD(seed) of TINY, with any settings; the folder is made once and must not be changed."""
    made: dict[str, Path] = {}

    def adapter(seed: int, **settings: Any) -> Path:
        key = repr((seed, settings))
        if key not in made:
            made[key] = write_adapter(tmp_path_factory.mktemp("adapter"), tiny_model_dir, seed, **settings)
        return made[key]

    return adapter


def cached(output: RequestOutput) -> int:
    return output.metrics.cached_tokens


@pytest.mark.parametrize("in_place", [True, False])
def test_2_01_an_adapter_that_was_overwritten(tiny_model_dir: Path, make: Make, tmp_path: Path, in_place: bool) -> None:
    folder = tmp_path / "a"
    shutil.copytree(make(1), folder)
    llm = LLM(str(tiny_model_dir), adapters={"a": folder}, **OPTIONS)
    assert_eq(llm.generate(PROMPT, GREEDY, adapter="a")[0], cold(tiny_model_dir, PROMPT, adapter=make(1)))
    llm.generate(PROMPT, GREEDY)
    shutil.copytree(make(2), folder, dirs_exist_ok=True)
    if not in_place:
        llm.unload_adapter("a")
    llm.load_adapter("a", folder)
    output = llm.generate(PROMPT, GREEDY, adapter="a")[0]
    assert cached(output) == 0
    assert_eq(output, cold(tiny_model_dir, PROMPT, adapter=make(2)))
    assert cached(llm.generate(PROMPT, GREEDY)[0]) == 8


def test_2_02_kv_is_of_the_adapter_that_made_it(tiny_model_dir: Path, make: Make) -> None:
    folders = {"A": make(1), "B": make(2), None: None, "A halved": make(1, lora_alpha=4)}
    adapters = {name: folder for name, folder in folders.items() if name and folder}
    llm = LLM(str(tiny_model_dir), adapters=adapters, **OPTIONS)
    for name, folder in folders.items():
        output = llm.generate(PROMPT, GREEDY, adapter=name)[0]
        assert cached(output) == 0
        assert_eq(output, cold(tiny_model_dir, PROMPT, adapter=folder))
    for name, folder in folders.items():
        output = llm.generate(PROMPT, GREEDY, adapter=name)[0]
        assert cached(output) == 8
        assert_eq(output, cold(tiny_model_dir, PROMPT, adapter=folder))


def test_2_02_equal_content_shares_whatever_its_name(tiny_model_dir: Path, make: Make, tmp_path: Path) -> None:
    shutil.copytree(make(1), tmp_path / "copy")
    llm = LLM(str(tiny_model_dir), adapters={"a": make(1), "b": tmp_path / "copy"}, max_loras=1, **OPTIONS)
    llm.generate(PROMPT, GREEDY, adapter="a")
    assert cached(llm.generate(PROMPT, GREEDY, adapter="b")[0]) == 8


MIXED = (("A", 3), ("B", 9), ("A", 1), (None, 5), ("C", 12), ("B", 2), ("A", 7), (None, 4))


@pytest.fixture(scope="session")
def abc(make: Make) -> dict[str, Path]:
    return {"A": make(1, r=4), "B": make(2, r=8, targets=ALL), "C": make(3, r=16, use_dora=True)}


@pytest.fixture(scope="session")
def mixed_alone(tiny_model_dir: Path, abc: dict[str, Path]) -> list[RequestOutput]:
    return [
        cold(tiny_model_dir, [(7 * i + j) % 256 for j in range(length)], adapter=None if name is None else abc[name])
        for i, (name, length) in enumerate(MIXED)
    ]


@pytest.mark.parametrize("seed", range(11))
def test_2_03_rows_of_a_mixed_batch(
    tiny_model_dir: Path, abc: dict[str, Path], mixed_alone: list[RequestOutput], seed: int
) -> None:
    order = list(range(len(MIXED)))
    if seed:
        random.Random(seed).shuffle(order)
    llm = LLM(str(tiny_model_dir), adapters=abc, **OPTIONS)
    prompts = [mixed_alone[i].prompt_token_ids for i in order]
    outputs = llm.generate(prompts, GREEDY, adapter=[MIXED[i][0] for i in order])
    for i, output in zip(order, outputs, strict=True):
        assert_eq(output, mixed_alone[i])


@pytest.mark.parametrize("chunk", [8, 9, 13])
def test_2_03_prefill_mixed_with_decode(
    tiny_model_dir: Path, abc: dict[str, Path], mixed_alone: list[RequestOutput], chunk: int
) -> None:
    llm = LLM(str(tiny_model_dir), adapters=abc, max_num_seqs=8, max_num_batched_tokens=chunk, max_loras=2, **OPTIONS)
    prompts = [output.prompt_token_ids for output in mixed_alone]
    outputs = llm.generate(prompts, GREEDY, adapter=[name for name, _ in MIXED])
    for output, alone in zip(outputs, mixed_alone, strict=True):
        assert_eq(output, alone)


@pytest.fixture(scope="session")
def eight(make: Make) -> dict[str, Path]:
    """Eight adapters of ranks 4 to 64, of several kinds."""
    kinds: list[dict[str, Any]] = [{}, {"targets": ALL}, {"use_dora": True}, {"use_rslora": True, "std": 0.1}]
    ranks = (4, 5, 8, 16, 24, 32, 48, 64)
    return {f"r{r}": make(r, r=r, **kinds[i % len(kinds)]) for i, r in enumerate(ranks)}


@pytest.mark.parametrize("seed", range(3))
def test_2_03_32_requests_over_8_adapters_in_random_order(
    tiny_model_dir: Path, eight: dict[str, Path], seed: int
) -> None:
    rng = random.Random(seed)
    names = [rng.choice([*eight, None]) for _ in range(32)]
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in names]
    llm = LLM(
        str(tiny_model_dir), adapters=eight, max_loras=rng.choice([2, 8]), max_num_seqs=16, max_num_batched_tokens=40,
        **OPTIONS,
    )  # fmt: skip
    alone = LLM(str(tiny_model_dir), adapters=eight, enable_prefix_caching=False, **OPTIONS)
    for output, prompt, name in zip(llm.generate(prompts, GREEDY, adapter=names), prompts, names, strict=True):
        assert_eq(output, alone.generate(prompt, GREEDY, adapter=name)[0])


def test_2_04_loading_beside_what_runs(tiny_model_dir: Path, make: Make) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True, logprobs=0)
    folders = {f"A{i}": make(i) for i in range(1, 5)}
    llm = LLM(
        str(tiny_model_dir), adapters={"A1": folders["A1"], "A2": folders["A2"]}, max_loras=2,
        enable_prefix_caching=False, **OPTIONS,
    )  # fmt: skip
    streams = {name: llm.stream(PROMPT, params, adapter=name) for name in ("A1", "A2")}
    last = {}
    for at in range(64):
        for name, stream in streams.items():
            last[name] = next(stream)
        if at in (20, 30, 40):
            for name in ("A3", "A4"):
                llm.load_adapter(name, folders[name])
                llm.engine.submit(llm.engine.prepare(f"{name}-{at}", PROMPT, GREEDY, RequestOptions(adapter=name)))
    for name in streams:
        completed = last[name].completed
        assert completed is not None
        assert_eq(completed, cold(tiny_model_dir, PROMPT, params, adapter=folders[name]))
    while llm.engine.has_work():
        llm.engine.step()


def test_2_05_more_adapters_than_slots(tiny_model_dir: Path, abc: dict[str, Path]) -> None:
    llm = LLM(str(tiny_model_dir), adapters=abc, max_loras=2, **OPTIONS)
    names = ["A", "B", "C", None]
    outputs = llm.generate([PROMPT] * 4, GREEDY, adapter=names)
    for name, output in zip(names, outputs, strict=True):
        assert_eq(output, cold(tiny_model_dir, PROMPT, adapter=None if name is None else abc[name]))
    assert outputs[2].metrics.first_token > max(outputs[i].metrics.first_token for i in (0, 1, 3))  # C waited


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_2_06_loaded_adapters_do_not_starve_others(tokenizer: Tokenizer, policy: str) -> None:
    """The queue of the report: one slot, eight running; a new A comes whenever one ends, base requests in between."""
    registry = FakeRegistry(A=fake_adapter("A"), B=fake_adapter("B"))
    engine = make_engine(
        ContextRunner(256, 4), tokenizer, adapters=registry, max_loras=1, max_num_seqs=8, policy=policy, num_blocks=400
    )
    params = SamplingParams(max_tokens=6)
    submit(engine, "A0", PROMPT, params, adapter="A")
    submit(engine, "B", PROMPT, params, adapter="B")
    for i in range(1, 21):
        submit(engine, f"A{i}", [i, *PROMPT], params, adapter="A")
    ended: list[str] = []
    base_waits = []
    for at in range(300):
        if at % 4 == 0:
            submit(engine, f"base{at}", [100 + at % 100], replace(params, max_tokens=1))
        for output in step(engine):
            if output.completed is not None:
                ended.append(output.request_id)
                if output.request_id.startswith("A"):
                    submit(engine, f"A{21 + len(ended)}", [50, *PROMPT], params, adapter="A")
        running = sum(s.request.request_id.startswith("base") for s in engine.scheduler.waiting.candidates())
        base_waits.append(running)
        if "B" in ended:
            break
    assert "B" in ended
    assert sum(name.startswith("A") for name in ended[: ended.index("B")]) < 10
    assert sum(name.startswith("base") for name in ended) >= 2
    assert max(base_waits) <= 3  # seats may be taken, but B's wait holds none of them up


def test_2_07_rslora(tiny_model_dir: Path, make: Make) -> None:
    assert_like_peft(tiny_model_dir, make(1, r=16, lora_alpha=32, use_rslora=True))


def test_2_08_dora(tiny_model_dir: Path, make: Make, tmp_path: Path) -> None:
    dora = make(1, use_dora=True)
    assert_like_peft(tiny_model_dir, dora)
    llm = LLM(str(tiny_model_dir), **OPTIONS)
    with pytest.raises(AdapterError, match="DoRA"):
        llm.load_adapter("unset", changed_copy(dora, tmp_path / "unset", use_dora=False))
    assert llm.list_adapters() == []


def test_2_09_whole_tables_are_refused(tiny_model_dir: Path, make: Make, tmp_path: Path) -> None:
    llm = LLM(str(tiny_model_dir), adapters={"good": make(1)}, **OPTIONS)
    before = {name: llm.generate(PROMPT, GREEDY, adapter=name)[0] for name in (None, "good")}
    saved = changed_copy(make(1), tmp_path / "saved", modules_to_save=["lm_head", "embed_tokens"])
    with pytest.raises(AdapterError, match="modules_to_save"):
        llm.load_adapter("bad", saved)
    for name, output in before.items():
        assert_eq(llm.generate(PROMPT, GREEDY, adapter=name)[0], output)
    assert [info.name for info in llm.list_adapters()] == ["good"]


def test_2_10_unknown_targets_are_refused(tiny_model_dir: Path, make: Make, tmp_path: Path) -> None:
    llm = LLM(str(tiny_model_dir), **OPTIONS)
    with pytest.raises(AdapterError, match="no_such_proj"):
        llm.load_adapter(
            "bad",
            changed_copy(
                make(1), tmp_path / "bad", rename=lambda key: key.replace("q_proj", "no_such_proj"),
                target_modules=["no_such_proj", "k_proj", "v_proj", "o_proj"],
            ),
        )  # fmt: skip
    assert llm.list_adapters() == []


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("targets", [r".*layers\.(0|1)\.self_attn\.(q|v)_proj", "all-linear"])
def test_2_11_targets_as_a_pattern(tiny_model_dir: Path, make: Make, targets: str, safe: bool) -> None:
    assert_like_peft(tiny_model_dir, make(1, targets=targets, safe_serialization=safe))


def test_2_12_bad_adapters_leave_the_engine_as_it_was(tiny_model_dir: Path, make: Make, tmp_path: Path) -> None:
    no_weights = changed_copy(make(1), tmp_path / "no-weights")
    (no_weights / WEIGHTS).unlink()
    wrong = changed_copy(make(1), tmp_path / "wrong", change=narrow_first)
    llm = LLM(str(tiny_model_dir), max_lora_rank=16, **OPTIONS)
    for path in (make(1, r=64), no_weights, wrong, tmp_path / "nowhere"):
        with pytest.raises(AdapterError):
            llm.load_adapter("bad", path)
        assert llm.list_adapters() == []
        with pytest.raises(AdapterNotFoundError, match="bad"):
            llm.generate(PROMPT, GREEDY, adapter="bad")
        assert_eq(llm.generate(PROMPT, GREEDY)[0], cold(tiny_model_dir, PROMPT))
    llm.load_adapter("largest", make(1, r=16))
    assert_eq(llm.generate(PROMPT, GREEDY, adapter="largest")[0], cold(tiny_model_dir, PROMPT, adapter=make(1, r=16)))


class MakesAFile:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_2_13_pickles_run_no_code(tiny_model_dir: Path, make: Make, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = changed_copy(make(1), tmp_path / "a")
    torch.save({"x": MakesAFile(marker)}, folder / "adapter_model.bin")
    llm = LLM(str(tiny_model_dir), adapters={"both": folder}, **OPTIONS)  # both kinds of file: safetensors is read
    assert_eq(llm.generate(PROMPT, GREEDY, adapter="both")[0], cold(tiny_model_dir, PROMPT, adapter=make(1)))
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterError):
        llm.load_adapter("pickle", folder)
    assert not marker.exists()


def narrow_first(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    key = next(key for key in tensors if "lora_A" in key)
    return tensors | {key: tensors[key][:, :-1].contiguous()}


def assert_like_peft(model: Path, folder: Path) -> None:
    """Greedy ids and their logprobs are PEFT's, and not the base model's."""
    llm = LLM(str(model), adapters={"a": folder}, **OPTIONS)
    output = llm.generate(PROMPT, GREEDY, adapter="a")[0].outputs[0]
    ids = [*PROMPT, *output.token_ids]
    with torch.inference_mode():
        logits = load_peft(folder, model)(input_ids=torch.tensor([ids])).logits[0]
    expected = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
    assert output.token_ids == expected.argmax(-1).tolist()
    assert output.logprobs is not None
    chosen = torch.tensor([entry.logprob for entry in output.logprobs])
    torch.testing.assert_close(chosen, expected.max(-1).values, atol=1e-4, rtol=0)
    assert output.token_ids != llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
