"""What every engine promises, run over every engine there is."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from palingenesis.rl.chat.template import ChatTemplate, load_tokenizer
from palingenesis.rl.engines.hf import HFEngine
from palingenesis.rl.engines.scripted import ScriptedEngine
from palingenesis.rl.errors import EngineError
from palingenesis.rl.observe import waits
from palingenesis.rl.observe.pace import pace
from palingenesis.rl.policy.model import Policy, load_policy, policy_path
from palingenesis.rl.policy.weights import PolicyWeights
from palingenesis.rl.types import Completion, Engine, Finish, Message, SamplingParams


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("builtin:tiny", device=torch.device("cpu"), dtype=torch.float32)[0]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(load_tokenizer(policy_path("builtin:tiny")))


@dataclass
class Case:
    """An engine, prompts it can read, and the id that ends a turn."""

    engine: Engine
    prompts: list[tuple[int, ...]]
    stop: int

    def params(self, **changes: Any) -> SamplingParams:
        return SamplingParams(**({"max_new_tokens": 24, "stop_token_ids": (self.stop,)} | changes))

    def generate(self, *requests: tuple[tuple[int, ...], SamplingParams]) -> list[Completion]:
        async def all_at_once() -> list[Completion]:
            return list(await asyncio.gather(*(self.engine.generate(p, s) for p, s in requests)))

        return asyncio.run(all_at_once())


def hf(policy: Policy, template: ChatTemplate) -> Case:
    tokenizer = template.tokenizer
    prompts = [template.render([Message("user", text)]).ids for text in ("12 + 34 = ?", "9 + 9 = ?", "77 + 88 = ?")]
    return Case(HFEngine(policy.model, tokenizer.pad_token_id), prompts, tokenizer.eos_token_id)


def scripted(policy: Policy, template: ChatTemplate) -> Case:
    def script(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        return [*(5 + (params.seed + len(prompt)) % 7 for _ in range(6)), 1]

    return Case(ScriptedEngine(script), [(1, 2, 3), (4, 5), (6, 7, 8, 9)], stop=1)


def hf_copy(policy: Policy, template: ChatTemplate) -> Case:
    case = hf(policy, template)
    case.engine.close()
    case.engine = HFEngine(policy.model, template.tokenizer.pad_token_id, own_copy=True)
    return case


def scripted_slow(policy: Policy, template: ChatTemplate) -> Case:
    case = scripted(policy, template)
    case.engine = ScriptedEngine(lambda prompt, params: [5] * params.max_new_tokens, delay=0.5)
    return case


def vllm(policy: Policy, template: ChatTemplate) -> Case:
    from palingenesis.rl.engines.vllm import VLLMEngine, VLLMOptions

    case = hf(policy, template)
    case.engine.close()
    options = VLLMOptions(policy_path("builtin:tiny"), "float32", "cpu", max_model_len=512)
    case.engine = VLLMEngine(options)
    case.engine.load(PolicyWeights(0, policy.model))
    return case


Make = Callable[[Policy, ChatTemplate], Case]
ENGINES: dict[str, Make] = {"hf": hf, "hf-copy": hf_copy, "scripted": scripted}
OVERLAPPING: dict[str, Make] = {"hf-copy": hf_copy, "scripted": scripted_slow}  # may be loaded while requests run
if find_spec("vllm") and not torch.cuda.is_available():  # scripts/check-vllm; a GPU's is in tests/vllm
    ENGINES["vllm"] = OVERLAPPING["vllm"] = vllm


@pytest.fixture(params=ENGINES)
def case(request: pytest.FixtureRequest, policy: Policy, template: ChatTemplate) -> Iterator[Case]:
    made = ENGINES[request.param](policy, template)
    yield made
    made.engine.close()


def test_it_is_an_engine(case: Case) -> None:
    assert isinstance(case.engine, Engine)


def test_one_logprob_and_one_version_a_token(case: Case) -> None:
    for completion in case.generate(*((prompt, case.params(seed=i)) for i, prompt in enumerate(case.prompts))):
        assert 0 < len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)
        assert all(value <= 0 for value in completion.logprobs)


def test_a_turn_ends_with_its_stop_token_or_at_its_budget(case: Case) -> None:
    long, short = case.generate(
        (case.prompts[0], case.params(seed=1)), (case.prompts[0], case.params(max_new_tokens=2))
    )
    assert long.finish is Finish.STOP
    assert long.token_ids[-1] == case.stop
    assert case.stop not in long.token_ids[:-1]
    assert short.finish is Finish.LENGTH
    assert len(short.token_ids) == 2


def test_requests_of_one_batch_may_ask_for_different_things(case: Case) -> None:
    budgets = [1, 3, 5]
    done = case.generate(*((p, case.params(max_new_tokens=n)) for p, n in zip(case.prompts, budgets, strict=True)))
    assert [len(c.token_ids) for c in done] == budgets


def test_the_seed_decides_the_draw(case: Case) -> None:
    requests = [(case.prompts[0], case.params(seed=seed)) for seed in (3, 3, 4, 5, 6, 7, 8)]
    first, again, *others = case.generate(*requests)
    assert first.token_ids == again.token_ids
    assert any(other.token_ids != first.token_ids for other in others)


def test_tokens_carry_the_version_of_their_weights(case: Case, policy: Policy) -> None:
    case.engine.load(PolicyWeights(7, policy.model))
    (completion,) = case.generate((case.prompts[0], case.params()))
    assert set(completion.versions) == {7}


def test_usage_counts_since_the_last_call(case: Case) -> None:
    case.engine.usage()
    done = case.generate(*((prompt, case.params()) for prompt in case.prompts))
    usage = case.engine.usage()
    assert usage.prefill_tokens + usage.cached_tokens == sum(map(len, case.prompts))
    assert usage.generated_tokens == sum(len(c.token_ids) for c in done)
    assert max(running for _, running in usage.timeline) == len(case.prompts)
    assert usage.timeline[-1][1] == 0
    assert case.engine.usage().generated_tokens == 0


def test_it_works_again_after_sleeping(case: Case) -> None:
    case.engine.sleep()
    case.engine.wake()
    (completion,) = case.generate((case.prompts[0], case.params()))
    assert completion.token_ids


def wait_for_tokens() -> None:
    """Until an engine says that it moves, and some tokens more."""
    began = time.monotonic()
    while waits._moved.get("engine", (0.0, ""))[0] < began:
        assert time.monotonic() < began + 30
        time.sleep(0.01)
    time.sleep(0.1)


@pytest.mark.parametrize("make", OVERLAPPING.values(), ids=OVERLAPPING)
def test_loading_keeps_running_requests_and_labels_their_tokens(
    make: Make, policy: Policy, template: ChatTemplate
) -> None:
    case = make(policy, template)
    case.engine.load(PolicyWeights(1, policy.model))
    budget = 200
    endless = case.params(max_new_tokens=budget, stop_token_ids=())
    done: list[Completion] = []
    requests = threading.Thread(target=lambda: done.extend(case.generate(*((p, endless) for p in case.prompts))))
    requests.start()
    wait_for_tokens()
    case.engine.load(PolicyWeights(2, policy.model))
    assert requests.is_alive(), "they were running"
    requests.join(30)
    assert len(done) == len(case.prompts)
    for completion in done:
        assert len(completion.token_ids) == budget
        assert list(completion.versions) == sorted(completion.versions)
        assert set(completion.versions) == {1, 2}
    (after,) = case.generate((case.prompts[0], case.params()))
    assert set(after.versions) == {2}
    case.engine.close()


# What only the embedded engine can promise.


def changed(policy: Policy) -> Policy:
    """Another policy of the same shape."""
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.0 + 0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return other


def worst_difference(case: Case, policy: Policy) -> float:
    requests = [(p, case.params(seed=s)) for p in case.prompts for s in range(8)]
    worst = 0.0
    for (prompt, _), completion in zip(requests, case.generate(*requests), strict=True):
        expected = trainer_logprobs(policy, prompt, completion.token_ids, 1.0)
        worst = max(worst, float((torch.tensor(completion.logprobs) - expected).abs().max()))
    return worst


def test_a_copy_samples_with_the_weights_it_was_given(policy: Policy, template: ChatTemplate) -> None:
    case, other = hf_copy(policy, template), changed(policy)
    assert worst_difference(case, policy) < 1e-4
    assert worst_difference(case, other) > 0.01, "the test tells them apart"
    case.engine.load(PolicyWeights(1, other.model))
    assert worst_difference(case, other) < 1e-4
    with torch.no_grad():
        other.model.get_input_embeddings().weight.zero_()  # the trainer goes on; the engine's copy does not
    case.engine.load(PolicyWeights(2, policy.model))
    assert worst_difference(case, policy) < 1e-4
    case.engine.close()


def test_a_burst_is_one_wave_however_long_it_takes(
    policy: Policy, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch a row is computed in depends on what was asked, not on how fast prompts and answers were computed."""
    case, sizes = hf(policy, template), []
    run = HFEngine._run

    async def counted(self: HFEngine, batch: list[Any]) -> None:
        sizes.append(len(batch))
        await run(self, batch)

    def compute() -> None:
        time.sleep(0.002)

    async def episode(seed: int) -> None:
        for _ in range(2):
            await pace()
            compute()  # renders
            await case.engine.generate(case.prompts[0], case.params(max_new_tokens=2, seed=seed))
            await pace()
            compute()  # parses
            await asyncio.wait({asyncio.create_task(asyncio.sleep(0))})  # calls a tool

    async def all_at_once() -> None:
        await asyncio.gather(*map(episode, range(40)))

    monkeypatch.setattr(HFEngine, "_run", counted)
    asyncio.run(all_at_once())
    case.engine.close()
    assert sizes == [40, 40]


def test_the_first_tokens_of_a_wave_are_of_the_old_weights(policy: Policy, template: ChatTemplate) -> None:
    """In the middle of a wave the keys and values stay, so only the tokens before the load can be recomputed."""
    case, other = hf_copy(policy, template), changed(policy)
    endless = case.params(max_new_tokens=200, stop_token_ids=())
    done: list[Completion] = []
    wave = threading.Thread(target=lambda: done.extend(case.generate((case.prompts[0], endless))))
    wave.start()
    wait_for_tokens()
    case.engine.load(PolicyWeights(1, other.model))
    wave.join(30)
    case.engine.close()
    (completion,) = done
    before = completion.versions.count(0)
    assert 0 < before < 200
    expected = trainer_logprobs(policy, case.prompts[0], completion.token_ids, 1.0)
    differences = (torch.tensor(completion.logprobs) - expected).abs()
    assert float(differences[:before].max()) < 1e-4
    assert float(differences[before:].max()) > 0.01


def test_weights_that_lack_a_tensor_are_refused(policy: Policy, template: ChatTemplate) -> None:
    class Partial(PolicyWeights):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(super().tensors())[1:]

    case = hf_copy(policy, template)
    with pytest.raises(EngineError, match=r"the weights of step 3 lack model\.embed_tokens\.weight"):
        case.engine.load(Partial(3, policy.model))
    case.engine.close()


def test_a_wave_that_hangs_does_not_hold_up_the_end(
    policy: Policy, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palingenesis.rl.engines.hf.CLOSE_S", 0.3)
    case = hf(policy, template)
    gate, own = threading.Event(), policy.model.generation_config
    hook = policy.model.get_input_embeddings().register_forward_hook(lambda *_: gate.wait() and None)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(case.engine.generate(case.prompts[0], case.params()), 0.3)
        case.engine.close()
        gate.set()

    asyncio.run(give_up())
    hook.remove()
    assert policy.model.generation_config is own, "a checkpoint written now is as it was"


def trainer_logprobs(
    policy: Policy, prompt: tuple[int, ...], answer: tuple[int, ...], temperature: float
) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        hidden = policy.hidden_states(ids)[0, len(prompt) - 1 : -1]
        logits = policy.head(hidden).double() / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(answer)), list(answer)]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_sampled_logprobs_are_the_trainers(policy: Policy, template: ChatTemplate, temperature: float) -> None:
    case = hf(policy, template)
    requests = [(p, case.params(temperature=temperature, seed=s)) for p in case.prompts for s in range(8)]
    worst = 0.0
    for (prompt, _), completion in zip(requests, case.generate(*requests), strict=True):
        expected = trainer_logprobs(policy, prompt, completion.token_ids, temperature)
        worst = max(worst, float((torch.tensor(completion.logprobs) - expected).abs().max()))
    case.engine.close()
    assert worst < 1e-4


def test_greedy_takes_the_likeliest_token(policy: Policy, template: ChatTemplate) -> None:
    case = hf(policy, template)
    requests = [(p, case.params(temperature=0.0, seed=s)) for p in case.prompts for s in (1, 2)]
    done = case.generate(*requests)
    case.engine.close()
    for one, other in zip(done[::2], done[1::2], strict=True):
        assert one.token_ids == other.token_ids
    ids = torch.tensor([[*case.prompts[0], *done[0].token_ids]])
    with torch.no_grad():
        best = policy.model(input_ids=ids).logits[0, len(case.prompts[0]) - 1 : -1].argmax(-1)
    assert best.tolist() == list(done[0].token_ids)


def test_the_sampler_draws_from_the_softmax(policy: Policy, template: ChatTemplate) -> None:
    """Frequencies of 4,000 first tokens against their probabilities: chi-squared per degree of freedom near 1."""
    case = hf(policy, template)
    prompt, n = case.prompts[2], 4000
    done = case.generate(*((prompt, case.params(max_new_tokens=1, temperature=1.5, seed=s)) for s in range(n)))
    case.engine.close()
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        p = torch.softmax(policy.model(input_ids=ids).logits[0, -1].double() / 1.5, -1)
    counts = torch.zeros_like(p)
    for completion in done:
        counts[completion.token_ids[0]] += 1
    often = p * n >= 5
    chi2 = ((counts - p * n) ** 2 / (p * n))[often].sum()
    freedom = int(often.sum()) - 1
    assert freedom >= 3
    assert float(chi2) < freedom + 5 * (2 * freedom) ** 0.5


def test_a_failing_model_fails_every_request_of_the_wave(policy: Policy, template: ChatTemplate) -> None:
    case = hf(policy, template)
    too_large = (10**6,)  # no such token

    async def both() -> list[Any]:
        work = (case.engine.generate(p, case.params()) for p in (case.prompts[0], too_large))
        return await asyncio.gather(*work, return_exceptions=True)

    outcomes = asyncio.run(both())
    assert all(isinstance(outcome, EngineError) for outcome in outcomes)
    assert case.generate((case.prompts[0], case.params()))[0].token_ids, "the engine works on"
    case.engine.close()


def test_a_model_full_of_sampling_defaults_does_not_bend_the_draw(policy: Policy, template: ChatTemplate) -> None:
    """`generate` would take top-k, penalties and the like from the checkpoint's own generation config."""
    case = hf(policy, template)
    request = (case.prompts[1], case.params(temperature=1.5, seed=11))
    (plain,) = case.generate(request)
    own = policy.model.generation_config
    before = own.to_dict()
    own.update(top_k=1, top_p=0.1, repetition_penalty=9.0, temperature=0.01, do_sample=True, min_new_tokens=9)
    (bent,) = case.generate(request)
    own.update(**before)
    case.engine.close()
    assert bent.token_ids == plain.token_ids
    assert bent.logprobs == plain.logprobs
