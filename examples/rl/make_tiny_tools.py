"""Makes `builtin:tiny-tools`, the packaged policy that learns to use a calculator.

    tokenizer, architecture, training loop     those of make_tiny_policy.py, with more words that are one token
    chat template                              make_tiny_policy.py's, but a tool is shown as `calculator(expression)`
    supervised products, said in four ways     stopped when TARGET of the rollouts that call end right

A policy is wanted that has seen a call and is not sure of it. No policy of this size can multiply, so an answer without
the tool is a guess. Of the conversations it is trained on

    50 %  guess, though the tool is there      \\boxed{28454}
    10 %  write the call as it is shown        <tool_call>\\ncalculator(347 * 82)\\n</tool_call>, which no parser reads
    30 %  call and copy the result             <tool_call>\\n{"name": "calculator", ...}\\n</tool_call>, \\boxed{28454}
    10 %  have no tool, and guess

Labels are never wrong: a guess is trained on the right product, which it cannot learn. Copying (the numbers into the
call, the result into the box) is not quite learned when training stops. The target is of what is sampled at temperature
1, not of what is greedy: the greedy choice is a guess for nearly every product.

One thread and a seed make a run repeatable on one kind of processor, as in make_tiny_policy.py.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from make_tiny_policy import BUILTIN, SEED, TEMPLATE, Example, build_model, build_tokenizer, store, train
from prepare_multiplication import Pair, row, split_pairs
from transformers import Qwen3ForCausalLM

from palingenesis.rl.chat import ChatTemplate, ToolResults
from palingenesis.rl.config import EnvConfig
from palingenesis.rl.engines.hf import HFEngine
from palingenesis.rl.envs import build
from palingenesis.rl.rollout.budget import Budget
from palingenesis.rl.rollout.episode import Episode, Episodes
from palingenesis.rl.types import Message, Row, ToolCall

TARGET = 0.85
TOOL = "calculator"
ENV = EnvConfig(type="tools", tools=[f"{Path(__file__).with_name('calculator_tools.py')}:{TOOL}"])
BUDGET = Budget(max_new_tokens=24, max_completion_tokens=40, max_model_len=128)
ANSWER_TOKENS = 16  # a result fits; of an error the policy reads the beginning

# Beside every prompt's words, the pieces that a call and an answer are made of. Each is one token.
WORDS = (
    "system\n",
    "user\n",
    "assistant\n",
    "Tools:\n",
    TOOL,
    "expression",
    "\\boxed{",
    '\n{"name": "',
    '", "arguments": {"',
    '": "',
    '"}}\n',
    " * ",
    " = ?",
)

# How the template shows a tool. A JSON schema would make every prompt over four hundred tokens longer.
SCHEMAS = ('    {{- "Functions you may call', '</tool_call><|im_end|>\\n" }}\n')
SIGNATURES = """\
    {{- "Tools:\\n" }}
    {%- for tool in tools %}
        {%- set function = tool.function or tool %}
        {%- set parameters = function.parameters or {} %}
        {{- function.name + "(" + (parameters.properties or {}) | join(", ") + ")" }}
        {{- "\\n" if not loop.last }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
"""


def chat_template() -> str:
    source = TEMPLATE.read_text(encoding="utf-8")
    begin, end = SCHEMAS
    before, _, rest = source.partition(begin)
    _, _, after = rest.partition(end)
    return before + SIGNATURES + after


class Conversations:
    """Supervised conversations as the rollouts would have them: the same template, the same tokens between the turns."""

    def __init__(self, template: ChatTemplate, schemas: tuple[dict[str, object], ...]) -> None:
        self.template = template
        self.results = ToolResults(template, [template.tokenizer.eos_token_id])
        self.schemas = schemas
        self.ways: dict[Callable[[Pair], Example], int] = {
            self.guessed: 50,
            self.miswritten: 10,
            self.called: 30,
            self.without_tool: 10,
        }

    def draw(self, pairs: list[Pair]) -> list[Example]:
        ways = random.Random(SEED).choices(list(self.ways), list(self.ways.values()), k=len(pairs))
        return [way(pair) for way, pair in zip(ways, pairs, strict=True)]

    def guessed(self, pair: Pair) -> Example:
        return [self.prompt(pair), self.said(box(pair))]

    def without_tool(self, pair: Pair) -> Example:
        return [self.prompt(pair, tools=False), self.said(box(pair))]

    def miswritten(self, pair: Pair) -> Example:
        return [self.prompt(pair), self.said(f"<tool_call>\n{TOOL}({expression(pair)})\n</tool_call>")]

    def called(self, pair: Pair) -> Example:
        call = ToolCall(TOOL, {"expression": expression(pair)})
        written = json.dumps({"name": call.name, "arguments": dict(call.arguments)})
        given = self.results.render([call], [row(pair)["answer"]]).ids
        said = self.said(f"<tool_call>\n{written}\n</tool_call>")
        return [self.prompt(pair), said, (list(given), False), self.said(box(pair))]

    def prompt(self, pair: Pair, *, tools: bool = True) -> tuple[list[int], bool]:
        messages = [Message("user", row(pair)["prompt"])]
        return list(self.template.render(messages, self.schemas if tools else ()).ids), False

    def said(self, text: str) -> tuple[list[int], bool]:
        tokenizer = self.template.tokenizer
        return [*tokenizer.encode(text), tokenizer.eos_token_id], True


def expression(pair: Pair) -> str:
    return f"{pair[0]} * {pair[1]}"


def box(pair: Pair) -> str:
    return f"\\boxed{{{row(pair)['answer']}}}"


def play(
    engine: HFEngine, template: ChatTemplate, pairs: list[Pair], temperature: float, count: int = 1
) -> list[list[Episode]]:
    """`count` rollouts of each product, as a run would have them."""

    async def group(episodes: Episodes, number: int, pair: Pair) -> list[Episode]:
        messages = (Message("user", row(pair)["prompt"]),)
        seeds = range(number * count, (number + 1) * count)
        async with episodes.group(Row(str(number), messages, row(pair)), seeds, temperature=temperature) as played:
            return played

    async def everything() -> list[list[Episode]]:
        stop = (template.tokenizer.eos_token_id,)
        episodes = Episodes(
            engine, template, stop, BUDGET, build(ENV), max_turns=2, max_tool_output_tokens=ANSWER_TOKENS
        )
        return await asyncio.gather(*(group(episodes, number, pair) for number, pair in enumerate(pairs)))

    return asyncio.run(everything())


def is_right(episode: Episode) -> bool:
    trajectory = episode.trajectory
    return f"\\boxed{{{trajectory.row.columns['answer']}}}" in trajectory.completion


def called(episode: Episode) -> bool:
    """It wrote a call that could be read."""
    return any(segment.tool_calls for segment in episode.trajectory.segments)


def share(test: Callable[[Episode], bool], episodes: list[Episode]) -> float:
    return sum(map(test, episodes)) / max(1, len(episodes))


def right_of_calls(engine: HFEngine, template: ChatTemplate, pairs: list[Pair]) -> float:
    return share(is_right, [e for (e,) in play(engine, template, pairs, temperature=1.0) if called(e)])


def describe(engine: HFEngine, template: ChatTemplate, pairs: list[Pair]) -> None:
    count = 8
    greedy = [episode for (episode,) in play(engine, template, pairs, temperature=0.0)]
    groups = play(engine, template, pairs, temperature=1.0, count=count)
    every = [episode for group in groups for episode in group]
    print(f"greedy: right {share(is_right, greedy):.3f}, called {share(called, greedy):.3f}")
    print(f"at temperature 1: right {share(is_right, every):.3f}, called {share(called, every):.3f}", end=", ")
    print(f"right without a call {share(is_right, [e for e in every if not called(e)]):.3f}")
    mixed = [group for group in groups if 0 < share(is_right, group) < 1]
    print(f"mixed groups of {count}: {len(mixed) / len(groups):.3f}")


def main(out: Path) -> None:
    started = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    split = split_pairs()
    tokenizer = build_tokenizer(WORDS, chat_template())
    template = ChatTemplate(tokenizer)
    model = build_model(tokenizer)
    examples = Conversations(template, build(ENV).schemas or ()).draw(split.supervised)
    engine = HFEngine(model, tokenizer.pad_token_id)
    train(model, examples, lambda: right_of_calls(engine, template, split.held_out), TARGET)
    engine.close()
    store(model, tokenizer, out)
    print(f"trained in {time.monotonic() - started:.0f} s; stored in {out}")
    stored = Qwen3ForCausalLM.from_pretrained(out, dtype=torch.float32)
    describe(HFEngine(stored, tokenizer.pad_token_id), template, split.held_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=BUILTIN / "tiny-tools", help="folder to write the model to")
    main(parser.parse_args().out)
