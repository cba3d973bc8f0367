"""Makes `builtin:tiny`, the packaged policy that the quickstart and the tests train.

    byte-level tokenizer + ChatML template     every text has tokens, and the same text back
    Qwen3 architecture, 1.8 M parameters       head_dim 64 and an even number of KV heads: vLLM loads it unchanged
    supervised addition, completion-only loss  stopped at 0.40 greedy accuracy on the held-out pairs

A policy is wanted that has learned the format and half learned the sums. It answers with a short working, then a box:

    47 + 85 = ?    ->    12 12 \\boxed{132}<|im_end|>         sum of the units, sum of the tens, answer

Stopping early, instead of training on wrong labels, leaves it unsure rather than wrong: 16 samples hold a right answer
to four pairs in five, and groups with right and wrong answers are the ones that have advantages. The tens are summed
without the carry: with it the last step is a copy, and reinforcement learning took over twice the steps.

One thread and a seed make a run repeatable on one kind of processor; another's kernels may stop a few steps earlier or
later. The weights are stored in bfloat16, and the accuracies printed last are those of the stored weights.
"""

import argparse
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from prepare_addition import Pair, row, split_pairs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SEED = 0
TARGET = 0.40
TOLERANCE = 0.02
MAX_STEPS = 3000
BATCH = 64
LEARNING_RATE = 1e-3
WARMUP = 50
CONTEXT = 2048
MAX_NEW_TOKENS = 24

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Words that are one token instead of a token a letter: every prompt or answer has them, and short ones sample faster.
WORDS = ("system", "user", "assistant", "\\boxed")

TEMPLATE = Path(__file__).with_name("tiny_chat_template.jinja")
BUILTIN = Path(__file__).parents[2] / "src" / "palingenesis" / "rl" / "policy" / "builtin"
BOX = re.compile(r"\\boxed\{(\d+)\}")

# A conversation in parts: token ids, and whether the policy says them and is trained on them.
Example = list[tuple[list[int], bool]]


def build_tokenizer(words: Sequence[str], template: str) -> PreTrainedTokenizerFast:
    """Bytes are tokens 0..255, the words follow, the added tokens close the vocabulary. BPE without merges:
    `ignore_merges` lets a pre-token that is in the vocabulary (a word) be one token, everything else falls apart into
    its bytes. Where two words begin at the same place, the one named first is taken."""
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(as_bytes.pre_tokenize_str(word)[0][0] for word in words)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    any_word = Regex("|".join(re.escape(word) for word in words))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(any_word, behavior="isolated"), as_bytes])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    return model


def answer(pair: Pair) -> str:
    a, b = pair
    return f"{a % 10 + b % 10} {a // 10 + b // 10} \\boxed{{{a + b}}}"


def prompt_ids(tokenizer: PreTrainedTokenizerFast, pair: Pair) -> list[int]:
    messages = [{"role": "user", "content": row(pair)["prompt"]}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def example(tokenizer: PreTrainedTokenizerFast, pair: Pair) -> Example:
    completion = [*tokenizer.encode(answer(pair)), tokenizer.eos_token_id]
    return [(prompt_ids(tokenizer, pair), False), (completion, True)]


def encode(examples: list[Example], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels, padded on the right; -100 marks what is not trained on."""
    inputs = [[token for ids, _ in parts for token in ids] for parts in examples]
    labels = [[token if said else -100 for ids, said in parts for token in ids] for parts in examples]
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        pad([torch.tensor(ids) for ids in inputs], batch_first=True, padding_value=padding),
        pad([torch.tensor(ids) for ids in labels], batch_first=True, padding_value=-100),
    )


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[Pair], temperature: float, count: int = 1
) -> list[list[str]]:
    """`count` answers to each pair; temperature 0 is greedy. All prompts have the same length, so nothing is padded."""
    prompts = torch.tensor([prompt_ids(tokenizer, pair) for pair in pairs])
    how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=MAX_NEW_TOKENS,
        num_return_sequences=count,
        top_k=0,
        top_p=1.0,
        **how,
    )
    texts = tokenizer.batch_decode(output[:, prompts.shape[1] :], skip_special_tokens=True)
    return [texts[start : start + count] for start in range(0, len(texts), count)]


def is_right(pair: Pair, text: str) -> bool:
    found = BOX.findall(text)
    return bool(found) and int(found[-1]) == sum(pair)


def greedy_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[Pair]) -> float:
    answers = sample(model, tokenizer, pairs, temperature=0.0)
    return sum(is_right(pair, texts[0]) for pair, texts in zip(pairs, answers, strict=True)) / len(pairs)


def batches(count: int) -> Iterator[torch.Tensor]:
    while True:
        order = torch.randperm(count)
        for start in range(0, count, BATCH):
            yield order[start : start + BATCH]


def train(model: Qwen3ForCausalLM, examples: list[Example], accuracy: Callable[[], float], target: float) -> None:
    """Steps until the accuracy is within TOLERANCE of the target."""
    inputs, labels = encode(examples, model.config.pad_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step, chosen in enumerate(batches(len(inputs)), start=1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP)
        loss = model(input_ids=inputs[chosen], labels=labels[chosen]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            reached = accuracy()
            print(f"step {step}  loss {loss.item():.3f}  held-out accuracy {reached:.3f}", flush=True)
            if abs(reached - target) <= TOLERANCE:
                return
        if step == MAX_STEPS:
            raise SystemExit(f"no accuracy near {target} in {MAX_STEPS} steps")


def store(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def describe(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[Pair]) -> None:
    count = 16
    answers = sample(model, tokenizer, pairs, temperature=1.0, count=count)
    right = [sum(is_right(pair, text) for text in texts) for pair, texts in zip(pairs, answers, strict=True)]
    parsed = sum(bool(BOX.search(text)) for texts in answers for text in texts)
    print(f"greedy accuracy {greedy_accuracy(model, tokenizer, pairs):.3f}")
    print(f"at temperature 1: accuracy {sum(right) / len(pairs) / count:.3f}, parsed {parsed / len(pairs) / count:.3f}")
    print(f"pass@{count} {sum(n > 0 for n in right) / len(pairs):.3f}, mixed groups", end=" ")
    print(f"{sum(0 < n < count for n in right) / len(pairs):.3f}")


def main(out: Path) -> None:
    started = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    split = split_pairs()
    tokenizer = build_tokenizer(WORDS, TEMPLATE.read_text(encoding="utf-8"))
    model = build_model(tokenizer)
    examples = [example(tokenizer, pair) for pair in split.supervised]
    train(model, examples, lambda: greedy_accuracy(model, tokenizer, split.held_out), TARGET)
    store(model, tokenizer, out)
    print(f"trained in {time.monotonic() - started:.0f} s; stored in {out}")
    describe(Qwen3ForCausalLM.from_pretrained(out, dtype=torch.float32), tokenizer, split.held_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=BUILTIN / "tiny", help="folder to write the model to")
    main(parser.parse_args().out)
