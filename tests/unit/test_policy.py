"""The policy half: loading, masters, micro-batches, schedules, the step, checkpoints."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palingenesis.rl.chat.template import load_tokenizer
from palingenesis.rl.config import LossConfig, TrainConfig
from palingenesis.rl.engines.hf import HFEngine
from palingenesis.rl.errors import CheckpointError, ConfigError, ModelError
from palingenesis.rl.kernels.precision import mixed_precision
from palingenesis.rl.policy import checkpoint
from palingenesis.rl.policy.masters import Masters
from palingenesis.rl.policy.microbatch import microbatches
from palingenesis.rl.policy.model import Policy, check_backbone, load_policy, policy_path
from palingenesis.rl.policy.optim import build_optimizer, schedule
from palingenesis.rl.policy.step import PolicyStep
from palingenesis.rl.types import (
    Completion,
    Finish,
    Group,
    Message,
    Outcome,
    Rollout,
    Row,
    SamplingParams,
    Score,
    ScoredBatch,
    Segment,
    Trajectory,
)

CPU = torch.device("cpu")


def tiny(dtype: torch.dtype = torch.float32) -> tuple[Policy, Masters]:
    policy, values = load_policy("builtin:tiny", device=CPU, dtype=dtype)
    return policy, Masters(policy.model, values)


def logprobs(policy: Policy, prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad(), mixed_precision(policy.model):
        logits = policy.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1)[torch.arange(len(answer)), list(answer)]


def batch(policy: Policy, groups: int = 3, size: int = 4, noise: float = 0.05, vocabulary: int = 200) -> ScoredBatch:
    """Random tokens of ragged lengths; the sampler's log-probs are the policy's but for `noise`. Odd rollouts score 1."""
    generator = torch.Generator().manual_seed(0)

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(3, vocabulary, (length,), generator=generator).tolist())

    made = []
    for number in range(groups):
        row = Row(f"r{number}", (Message("user", "q"),), {})
        prompt = Segment("prompt", ids(4, 20), "", sampled=False)
        rollouts = []
        for index in range(size):
            answer = ids(1, 17)
            mu = logprobs(policy, prompt.token_ids, answer)
            mu = mu + noise * torch.randn(len(answer), generator=generator)
            turn = Segment("assistant", answer, "", True, tuple(mu.tolist()), (0,) * len(answer))
            reward = float(index % 2)
            score = Score({"r": reward}, reward, Outcome.SCORED)
            rollouts.append(Rollout(Trajectory(row, (prompt, turn), (), "", "", "", Finish.STOP), score, index))
        made.append(Group(row, tuple(rollouts), number))
    return ScoredBatch(1, tuple(made))


def step(policy: Policy, masters: Masters, loss: LossConfig | None = None, **train: object) -> PolicyStep:
    options = TrainConfig(**({"learning_rate": 1e-3, "warmup_steps": 0, "max_grad_norm": 1e9} | train))
    return PolicyStep(
        policy, masters, loss or LossConfig(seq_mask=0), options, temperature=1.0, max_completion_tokens=16
    )


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy.model.state_dict().items()}


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 500))
def test_micro_batches_hold_every_sequence_once_within_the_budget(lengths: list[int], budget: int) -> None:
    cuts = microbatches(lengths, budget)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or len(cut) * max(lengths[i] for i in cut) <= budget


@pytest.mark.parametrize("loss", ["masked_is", "cispo", "icepop", "gspo"])
def test_the_step_does_not_depend_on_micro_tokens(loss: str) -> None:
    """Through the real model and optimizer: gradient norm, metrics and weights."""
    results = []
    for micro_tokens in (1, 70, 10_000):
        policy, masters = tiny()
        result = step(policy, masters, LossConfig(type=loss, seq_mask=0), micro_tokens=micro_tokens).run(batch(policy))
        results.append((result, weights(policy)))
    (one, w_one), *others = results
    assert one.metrics["grad_norm"] > 0
    for other, w_other in others:
        assert other.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-7)
        assert other.advantages == one.advantages
        # AdamW's first step is lr * sign(g): where g is rounding noise its sign is too, hence not every weight.
        close = [torch.isclose(w_one[n], w_other[n], atol=1e-5) for n in w_one]
        assert sum(int(c.sum()) for c in close) > 0.999 * sum(c.numel() for c in close)


def test_the_policy_prefers_what_was_rewarded() -> None:
    policy, masters = tiny()
    trained = batch(policy, noise=0.0)
    rollouts = [r for g in trained.groups for r in g.rollouts]

    def sums() -> list[float]:
        pairs = [[segment.token_ids for segment in r.trajectory.segments] for r in rollouts]
        return [float(logprobs(policy, prompt, answer).sum()) for prompt, answer in pairs]

    before = sums()
    step(policy, masters, LossConfig(aggregation="token"), learning_rate=1e-6).run(trained)
    gained = [after - b for after, b in zip(sums(), before, strict=True)]
    assert sum(gained[1::2]) > sum(gained[0::2])


def test_an_empty_batch_changes_nothing() -> None:
    policy, masters = tiny()
    before = weights(policy)
    result = step(policy, masters).run(ScoredBatch(1, ()))
    assert not result.stepped
    assert all(torch.equal(before[n], value) for n, value in weights(policy).items())


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    policy, masters = tiny()
    worker = step(policy, masters)
    first = next(policy.model.parameters())
    first.register_hook(lambda gradient: gradient * float("nan"))
    before = weights(policy)
    with pytest.raises(ModelError, match="gradient of step 1 is not finite"):
        worker.run(batch(policy))
    assert all(torch.equal(before[n], value) for n, value in weights(policy).items())


def test_masters_of_a_bf16_model_are_float32_and_exact() -> None:
    policy, masters = tiny(torch.bfloat16)
    assert policy.model.dtype == torch.bfloat16
    assert {p.dtype for p in masters.parameters()} == {torch.float32}
    worker = step(policy, masters, learning_rate=1e-6)
    before = [master.detach().clone() for master in masters.parameters()]
    worker.run(batch(policy))
    moved = [float((now.detach() - b).abs().max()) for now, b in zip(masters.parameters(), before, strict=True)]
    assert all(0 < m < 2e-6 for m in moved), "updates of 1e-6 survive in float32"
    for name, (param, master) in masters.pairs.items():
        assert torch.equal(param, master.bfloat16()), name
        assert param.grad is None, name


def test_gradients_of_micro_batches_sum_in_float32() -> None:
    _, masters = tiny(torch.bfloat16)
    param, master = next(iter(masters.pairs.values()))
    for value in (256.0, 1.0, 1.0):  # in bf16, 256 + 1 is 256
        param.grad = torch.full_like(param, value)
        masters.collect()
    assert master.grad is not None
    assert set(master.grad.flatten().tolist()) == {258.0}


def test_learning_rate_schedules() -> None:
    constant, cosine = schedule("constant", 4, 12), schedule("cosine", 4, 12)
    assert [constant(k) for k in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert cosine(3) == 1.0
    assert cosine(8) == pytest.approx(0.5)
    assert cosine(12) == pytest.approx(0.0)
    assert schedule("constant", 0, 5)(0) == 1.0


def test_weight_decay_spares_vectors() -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([matrix, vector], learning_rate=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
    for p in (matrix, vector):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2))


def test_the_export_loads_and_a_tied_head_is_saved_once(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    policy, masters = tiny()
    tokenizer = load_tokenizer(policy_path("builtin:tiny"))
    folder = checkpoint.export(tmp_path / "final", policy, masters, tokenizer, torch.float32)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert again.dtype == torch.float32
    ids = torch.arange(3, 30).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, policy.model(ids).logits)


def test_checkpoints_keep_the_newest_and_skip_the_unfinished(tmp_path: Path) -> None:
    policy, masters = tiny()
    tokenizer = load_tokenizer(policy_path("builtin:tiny"))
    worker = step(policy, masters)
    worker.run(batch(policy))
    for number in (1, 2, 3):
        checkpoint.save(
            tmp_path,
            number,
            policy=policy,
            masters=masters,
            tokenizer=tokenizer,
            optimizer=copy.deepcopy(worker.state_dict()),
            collector={"a": number},
            keep=2,
        )
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_2", "step_3"]
    (tmp_path / "checkpoints" / "step_3" / "COMPLETE").unlink()
    found = checkpoint.find("auto", tmp_path)
    assert found is not None
    assert found.step == 2
    assert found.state()["collector"] == {"a": 2}
    with pytest.raises(CheckpointError, match="no COMPLETE marker"):
        checkpoint.find(str(tmp_path / "checkpoints" / "step_3"), tmp_path)
    with pytest.raises(CheckpointError, match=r"Did you mean .*step_2"):
        checkpoint.find(str(tmp_path), tmp_path)
    with pytest.raises(CheckpointError, match="there is no folder"):
        checkpoint.find(str(tmp_path / "nowhere"), tmp_path)
    assert checkpoint.find("", tmp_path) is None
    assert checkpoint.find("auto", tmp_path / "elsewhere") is None


def test_what_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"builtin:tinny.*did you mean 'tiny'"):
        policy_path("builtin:tinny")
    with pytest.raises(ModelError, match="cannot load"):
        load_policy(str(tmp_path), device=CPU, dtype=torch.float32)


def small_gemma(folder: Path) -> str:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    small = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.5,
    )  # fmt: skip
    model = Gemma2ForCausalLM(small)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
    model.save_pretrained(folder)
    return str(folder)


def test_a_soft_cap_on_the_logits_is_trained_as_it_is_sampled(tmp_path: Path) -> None:
    policy, values = load_policy(small_gemma(tmp_path), device=CPU, dtype=torch.float32)
    assert policy.logit_shape["softcap"] == 0.5
    result = step(policy, Masters(policy.model, values)).run(batch(policy, noise=0.0, vocabulary=64))
    assert result.metrics["policy/abs_ratio_dev"] < 1e-5


def test_a_head_that_does_something_unknown_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "logit_shape", {"softcap": 0.0, "scale": 1.0})
    with pytest.raises(ModelError, match="does something to its logits"):
        load_policy(small_gemma(tmp_path), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """In bf16 its log-probs may differ by less than those of a model that rounds its logits."""
    with pytest.raises(ModelError, match="lets a token see later ones"):
        small_random(tmp_path, "gemma3_text", dtype, use_bidirectional_attention=True)


def test_a_model_that_is_random_in_training_mode_does_not_recompute(tmp_path: Path) -> None:
    """OPT leaves whole layers out there; transformers recomputes activations in training mode only."""
    small_random(tmp_path, "opt", torch.float32, word_embed_proj_dim=64, layerdrop=1.0)
    with pytest.raises(ModelError, match=r"set model\.gradient_checkpointing to none"):
        load_policy(str(tmp_path), device=CPU, dtype=torch.float32, gradient_checkpointing=True)


def test_a_model_that_cannot_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = tiny()
    monkeypatch.setattr(type(policy.model.model), "forward", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ModelError, match="Qwen3ForCausalLM cannot be run: ZeroDivisionError"):
        check_backbone(policy)


def test_buffers_of_a_bf16_model_stay_float32() -> None:
    """Rotary frequencies rounded to bf16 are off by 0.4 %, and the angle's error grows with the position."""
    from transformers import AutoModelForCausalLM

    policy, _ = tiny(torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(policy_path("builtin:tiny"), dtype=torch.bfloat16)
    ours, theirs = dict(policy.model.named_buffers()), dict(plain.named_buffers())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_bf16_model_adds_up_in_float32() -> None:
    """Against the same bf16 weights in float32: closer than a model that rounds its residual after every block, and a
    gradient in bf16 of the same direction."""
    from transformers import AutoModelForCausalLM

    policy, _ = tiny(torch.bfloat16)
    path = policy_path("builtin:tiny")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float()
    ids = torch.randint(3, 200, (8, 60), generator=torch.Generator().manual_seed(0))
    ours = policy.hidden_states(ids)
    assert ours.dtype == torch.bfloat16
    true = exact.base_model(ids).last_hidden_state
    rounded = plain.base_model(ids).last_hidden_state
    error, theirs = (float((h.detach().float() - true.detach()).norm() / true.detach().norm()) for h in (ours, rounded))
    assert error < 0.8 * theirs
    ours.float().square().mean().backward()
    true.square().mean().backward()
    for (name, mine), reference in zip(policy.model.named_parameters(), exact.parameters(), strict=True):
        if reference.grad is not None:
            assert mine.grad is not None, name
            assert mine.grad.dtype == torch.bfloat16
            assert torch.cosine_similarity(mine.grad.float().flatten(), reference.grad.flatten(), 0) > 0.99, name


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.12,
}  # fmt: skip
LINEAR_ATTENTION: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OF_KIND = {"qwen3_5_text": LINEAR_ATTENTION, "gemma3_text": {"sliding_window": 8}, "qwen3_moe": EXPERTS}


def small_random(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16, **values: Any) -> Policy:
    """A small random model of another architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    small = AutoConfig.for_model(kind, **SMALL, **OF_KIND.get(kind, {}), **values)
    AutoModelForCausalLM.from_config(small, dtype=dtype).save_pretrained(folder)
    return load_policy(str(folder), device=CPU, dtype=dtype)[0]


@pytest.mark.parametrize(
    ("kind", "most"),
    # Linear attention: its authors widen what autocast would narrow again, and the sampler's recurrence is another sum.
    [("qwen3_5_text", 0.002), ("gpt2", 0.01), ("gpt_neox", 0.01), ("qwen3_moe", 0.02)],
)
def test_other_architectures_agree_in_bf16(tmp_path: Path, kind: str, most: float) -> None:
    policy = small_random(tmp_path, kind)
    assert mean_difference(policy) < most
    hidden = policy.hidden_states(torch.arange(3, 40)[None])
    hidden.float().square().mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in policy.model.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5_text", "gemma3_text", "gpt2", "gpt_neox", "qwen3_moe"])
def test_padding_behind_a_row_changes_nothing(tmp_path: Path, kind: str) -> None:
    policy = small_random(tmp_path, kind, torch.float32)
    row = torch.arange(3, 40)
    alone = policy.hidden_states(row[None])[0]
    padded = torch.nn.utils.rnn.pad_sequence([row, torch.arange(46)], batch_first=True)
    beside = policy.hidden_states(padded)[0, : len(row)]
    assert torch.allclose(beside, alone, atol=1e-5)


def test_the_embedded_engine_computes_as_the_trainer_does_in_bf16() -> None:
    assert mean_difference(tiny(torch.bfloat16)[0]) < 0.02


def mean_difference(policy: Policy) -> float:
    """Between the log-probs of the embedded engine's tokens and the trainer's of the same."""
    engine = HFEngine(policy.model, pad_token_id=0, own_copy=True)
    prompts = [tuple(range(3 + n, 20 + n)) for n in range(16)]

    async def wave() -> list[Completion]:
        params = (SamplingParams(24, 1.0, (), seed) for seed in range(len(prompts)))
        return list(await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, params, strict=True))))

    found = [
        logprobs(policy, prompt, done.token_ids) - torch.tensor(done.logprobs)
        for prompt, done in zip(prompts, asyncio.run(wave()), strict=True)
    ]
    engine.close()
    return float(torch.cat(found).abs().mean())


def test_resumed_moments_keep_the_options_of_the_config() -> None:
    policy, masters = tiny()
    before = step(policy, masters, adam_beta2=0.95)
    before.run(batch(policy))
    after = step(policy, masters, adam_beta2=0.99, weight_decay=0.1)
    after.load_state_dict(before.state_dict())
    assert {group["betas"][1] for group in after.optimizer.param_groups} == {0.99}
    assert {group["weight_decay"] for group in after.optimizer.param_groups} == {0.1, 0.0}
    assert after.optimizer.state, "the moments came along"
