"""The packaged policies and the data of `tiny`: what the quickstart, the end-to-end tests and vLLM rely on.

What both policies share is tested on both; what only `tiny-tools` has is in test_tiny_tools.py. Accuracies are bands,
not figures: the weights are fixed, but another machine's kernels may flip a close argmax.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "rl"
BUILTIN = ROOT / "src" / "palingenesis" / "rl" / "policy" / "builtin"
TINY = BUILTIN / "tiny"
BOX = re.compile(r"\\boxed\{(-?\d+)\}")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 4, "b": 7}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "4 + 7, twice?"},
    {"role": "assistant", "content": "Let me see.", "reasoning_content": "A tool helps.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "11"},
    {"role": "tool", "content": "12"},
    {"role": "assistant", "content": [{"type": "text", "text": "Eleven, "}, {"type": "text", "text": "it seems."}]},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "11"},
]


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    return load_example("prepare_addition")


@pytest.fixture(scope="module", params=["tiny", "tiny-tools"])
def folder(request: pytest.FixtureRequest) -> Path:
    return BUILTIN / str(request.param)


@pytest.fixture(scope="module")
def each(folder: Path) -> Any:
    """The tokenizer of each packaged policy."""
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(TINY, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, local_files_only=True)


@pytest.fixture(scope="module")
def heldout() -> list[dict[str, str]]:
    lines = (EXAMPLES / "data" / "addition" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# ---- data


def test_committed_rows_are_what_the_script_writes(prepare: ModuleType, tmp_path: Path) -> None:
    prepare.write(tmp_path)
    assert sorted(path.name for path in prepare.DATA.iterdir()) == ["heldout.jsonl", "train.jsonl"]
    for written in tmp_path.iterdir():
        assert written.read_bytes() == (prepare.DATA / written.name).read_bytes(), written.name


def test_no_sum_is_in_two_sets_in_either_order(prepare: ModuleType) -> None:
    split = prepare.split_pairs()
    sets = [{frozenset(pair) for pair in pairs} for pairs in (split.held_out, split.supervised, split.rl)]
    assert len(split.held_out) == len(sets[0]) == 500
    assert sum(map(len, sets)) == len(set().union(*sets)) == 90 * 91 // 2
    assert len(set(split.supervised)) == len(split.supervised)
    assert len(set(split.rl)) == len(split.rl)


def test_answers_are_the_sums(heldout: list[dict[str, str]]) -> None:
    for row in heldout:
        a, b = re.fullmatch(r"(\d\d) \+ (\d\d) = \?", row["prompt"]).groups()  # type: ignore[union-attr]
        assert row["answer"] == str(int(a) + int(b))


# ---- folder


def test_folder_is_complete_and_small(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4_000_000


def test_folder_is_in_the_wheel(folder: Path) -> None:
    """hatch packs every file below `packages` that git does not ignore."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert packages == {"packages": ["src/palingenesis"]}
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *map(str, folder.iterdir())], cwd=ROOT, capture_output=True, text=True
    )
    assert (ignored.returncode, ignored.stdout) == (1, "")  # 1: none is


def test_config_is_one_vllm_loads_unchanged(folder: Path, each: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert config["head_dim"] == 64
    assert config["num_key_value_heads"] % 2 == 0
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] >= 1024
    assert config["vocab_size"] % 64 == 0
    assert config["vocab_size"] >= len(each)
    assert (config["eos_token_id"], config["pad_token_id"]) == (each.eos_token_id, each.pad_token_id)


def test_generation_config_is_plain_sampling(folder: Path, each: Any) -> None:
    config = json.loads((folder / "generation_config.json").read_text())
    assert config["eos_token_id"] == each.eos_token_id
    assert (config["temperature"], config["top_k"], config["top_p"]) == (1.0, 0, 1.0)


# ---- tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "".join(map(chr, range(128))),
        "Grüße, Ωmega, 你好, नमस्ते, 👩‍👩‍👧‍👦\u200b\ufeff\ufffd",
        "  two  spaces\t\r\n\n tab ",
        "the user's system assistant \\boxed{\\boxed{1}} user",
        'system\nuser\nassistant\n Tools:\n\n{"name": "calculator", "arguments": {"expression": " * "}}\n = ? calculators',
        "".join(chr(code) for code in range(0x80, 0x20000, 61) if not 0xD800 <= code < 0xE000),
        '<tool_call>\n{"name": "add"}\n</tool_call><think></think><|im_start|>',
        "",
    ],
)
def test_any_text_round_trips(each: Any, text: str) -> None:
    assert each.decode(each.encode(text, add_special_tokens=False)) == text


def test_special_tokens_are_qwen3s(each: Any) -> None:
    added = {str(token): token.special for token in each.added_tokens_decoder.values()}
    control = {"<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True}
    markup = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    assert added == control | dict.fromkeys(markup, False)
    assert (each.eos_token, each.pad_token, each.padding_side) == ("<|im_end|>", "<|endoftext|>", "left")


def test_digits_are_tokens_and_a_prompt_is_short(tokenizer: Any) -> None:
    assert len(tokenizer.encode("132")) == 3
    assert len(tokenizer.encode("\\boxed{132}")) == 6
    messages = [{"role": "user", "content": "47 + 85 = ?"}]
    assert len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)) == 19


# ---- template


def render(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


def test_a_prompt_without_a_system_message_has_no_system_turn(each: Any) -> None:
    text = render(each, [{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("first", [0, 1])
def test_template_is_prefix_preserving(each: Any, tools: Any, first: int) -> None:
    """Cuts are between turns; tool results that follow each other are one turn."""
    messages = CONVERSATION[first:]
    whole = render(each, messages, tools=tools)
    for end in range(1, len(messages)):
        if messages[end - 1]["role"] == messages[end]["role"] == "tool":
            continue
        answered = messages[end]["role"] == "assistant"
        assert whole.startswith(render(each, messages[:end], tools=tools, add_generation_prompt=answered))


def test_tools_calls_and_results_render_in_hermes_form(tokenizer: Any) -> None:
    text = render(tokenizer, CONVERSATION[:6], tools=TOOLS)
    system, user, calls, results, last = (turn for turn in text.split("<|im_start|>") if turn)
    assert system.startswith("system\nBe brief.\n\n")
    assert system.endswith("</tool_call><|im_end|>\n")
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in system
    assert '{"name": <function name>, "arguments": <JSON object>}' in system
    assert user == "user\n4 + 7, twice?<|im_end|>\n"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 7}}\n</tool_call>'
    assert calls == f"assistant\n<think>\nA tool helps.\n</think>\n\nLet me see.\n{call}\n{call}<|im_end|>\n"
    assert results == "user\n<tool_response>\n11\n</tool_response>\n<tool_response>\n12\n</tool_response><|im_end|>\n"
    assert last == "assistant\nEleven, it seems.<|im_end|>\n"


def test_arguments_given_as_a_json_string_render_as_they_are(each: Any) -> None:
    call = {"function": {"name": "add", "arguments": '{"a":4}'}}
    text = render(each, [{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert text == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a":4}}\n</tool_call><|im_end|>\n'
    )


# ---- policy


def answers(model: Any, tokenizer: Any, rows: list[dict[str, str]], **how: Any) -> list[str]:
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    batch = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**batch, max_new_tokens=24, **how)
    decoded: list[str] = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return decoded


def test_greedy_accuracy_leaves_something_to_learn(model: Any, tokenizer: Any, heldout: list[dict[str, str]]) -> None:
    rows = heldout[:200]
    texts = answers(model, tokenizer, rows, do_sample=False)
    right = sum(BOX.findall(text)[-1:] == [row["answer"]] for row, text in zip(rows, texts, strict=True))
    assert 0.3 <= right / len(rows) <= 0.5


def test_sampled_answers_parse_and_are_often_right(model: Any, tokenizer: Any, heldout: list[dict[str, str]]) -> None:
    """What learning needs at the start: the format, and a right answer in most groups of 16."""
    torch.manual_seed(0)
    rows = [row for row in heldout[:50] for _ in range(16)]
    texts = answers(model, tokenizer, rows, do_sample=True)
    boxes = [BOX.findall(text)[-1:] for text in texts]
    assert sum(map(bool, boxes)) / len(rows) >= 0.9
    right = [box == [row["answer"]] for box, row in zip(boxes, rows, strict=True)]
    solved = [any(right[start : start + 16]) for start in range(0, len(rows), 16)]
    assert sum(solved) / len(solved) >= 0.7
