"""What only a GPU can show: bf16 compute over float32 masters, and the log-probs of both halves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from palingenesis.rl import RLConfig, RLTrainer
from palingenesis.rl.chat.template import ChatTemplate, load_tokenizer, stop_token_ids
from palingenesis.rl.engines.hf import HFEngine
from palingenesis.rl.kernels.head import selected_logprobs
from palingenesis.rl.kernels.reference import reference_logprobs
from palingenesis.rl.policy.masters import Masters
from palingenesis.rl.policy.model import load_policy, policy_path
from palingenesis.rl.types import Message, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda")
ROOT = Path(__file__).parents[2]


def test_the_head_in_bf16_keeps_float32_logits() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(777, 128, device=CUDA), torch.randn(5000, 128, device=CUDA) / 4
    targets = torch.randint(5000, (777,), device=CUDA)
    ours = [hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()]
    exact = [t.detach().double().requires_grad_() for t in ours]
    logp, entropy = selected_logprobs(ours[0], ours[1], None, targets, 1.3, slice_rows=100)
    true_logp, true_entropy = reference_logprobs(exact[0], exact[1], None, targets, 1.3)
    assert float((logp - true_logp).abs().max()) < 1e-3
    assert float((entropy - true_entropy).abs().max()) < 1e-3
    pull = torch.randn(777, device=CUDA)
    (logp * pull).sum().backward()
    (true_logp * pull).sum().backward()
    for mine, true in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert true.grad is not None
        assert float((mine.grad.double() - true.grad).norm() / true.grad.norm()) < 5e-3


def test_masters_keep_what_bf16_loses() -> None:
    """An update of 1e-6 is below a bf16 weight's last bit; the masters must add it up."""
    policy, values = load_policy("builtin:tiny", device=CUDA, dtype=torch.bfloat16)
    masters = Masters(policy.model, values)
    assert all(p.dtype == torch.float32 for p in masters.parameters())
    name, (param, master) = next(iter(masters.pairs.items()))
    before = master.detach().clone()
    with torch.no_grad():
        for _ in range(1000):
            master += 1e-6
    masters.publish()
    assert torch.allclose(master, before + 1e-3, atol=1e-5), name
    assert torch.equal(param, master.bfloat16())


def test_sampled_logprobs_agree_with_the_trainer_in_bf16() -> None:
    policy, _ = load_policy("builtin:tiny", device=CUDA, dtype=torch.bfloat16)
    template = ChatTemplate(load_tokenizer(policy_path("builtin:tiny")))
    stop = stop_token_ids(template.tokenizer, policy.model.generation_config.eos_token_id)
    engine = HFEngine(policy.model, template.tokenizer.pad_token_id)
    prompts = [template.render([Message("user", f"{n} + {n + 1} = ?")]).ids for n in range(10, 74)]

    async def wave() -> list[object]:
        params = (SamplingParams(24, 1.0, stop, seed) for seed in range(len(prompts)))
        return list(await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, params, strict=True))))

    differences = []
    for prompt, completion in zip(prompts, asyncio.run(wave()), strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]], device=CUDA)  # type: ignore[attr-defined]
        with torch.no_grad():
            hidden = policy.hidden_states(ids)[0, len(prompt) - 1 : -1]
            logp, _ = selected_logprobs(hidden, *policy.head_parameters, ids[0, len(prompt) :], 1.0)
        differences.append((logp.cpu() - torch.tensor(completion.logprobs)).abs())  # type: ignore[attr-defined]
    engine.close()
    assert float(torch.cat(differences).mean()) < 0.02


def test_a_run_learns_on_a_gpu(tmp_path: Path) -> None:
    config = RLConfig.from_yaml(
        ROOT / "configs/rl_quickstart.yaml",
        ["--train.output_dir", str(tmp_path / "run"), "--train.steps", "40", "--train.save_steps", "20"],
    )
    RLTrainer(config).train()
    import json

    evals = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert evals[-1]["reward"] > evals[0]["reward"] + 0.2
