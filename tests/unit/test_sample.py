"""The draw of the vLLM engine (kernels/sample.py): the inverse CDF at a hashed uniform number."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palingenesis.rl.kernels.sample import sample, sample_reference, uniform


def splitmix(seed: int, position: int) -> float:
    """SplitMix64 in plain integers."""
    mask = 2**64 - 1
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1))
def test_the_uniform_number_is_splitmix64(seed: int, position: int) -> None:
    drawn = uniform(torch.tensor([seed]), torch.tensor([position], dtype=torch.int32))
    assert drawn.item() == splitmix(seed, position)


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    n = 100_000
    for seeds, positions in ((torch.arange(n), torch.zeros(n)), (torch.full((n,), 7), torch.arange(n))):
        drawn = uniform(seeds, positions)
        counts = torch.histc(drawn, bins=100, min=0, max=1)
        assert float(((counts - n / 100) ** 2 / (n / 100)).sum()) < 99 + 5 * (2 * 99) ** 0.5
        assert float(drawn.mean() - 0.5) < 5 / (12 * n) ** 0.5


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.floats(0.0, 1.0, exclude_max=True), st.sampled_from([0.5, 1.0, 2.0]))
def test_the_token_is_where_the_cdf_passes_the_draw(seed: int, draw: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 50, generator=generator) * 5
    logits[0, ::3] = -torch.inf
    token, logprob = sample_reference(logits, torch.tensor([temperature]), torch.tensor([draw], dtype=torch.float64))
    p = torch.softmax(logits[0].double() / temperature, -1)
    cdf = p.cumsum(0)
    chosen = int(token)
    assert p[chosen] > 0
    assert cdf[chosen] > draw - 1e-6
    assert cdf[chosen] - p[chosen] < draw + 1e-6
    assert abs(float(logprob) - float(p[chosen].log())) < 1e-5


def test_a_draw_next_to_one_stays_on_a_possible_token() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
    token, logprob = sample_reference(logits, torch.tensor([1.0]), torch.tensor([1.0 - 2.0**-53], dtype=torch.float64))
    assert int(token) == 1
    assert torch.isfinite(logprob).all()


def test_of_nan_logits_the_token_is_one_of_the_vocabulary_and_the_logprob_says_so() -> None:
    tokens, logprobs = sample(
        torch.full((2, 30), torch.nan), torch.tensor([0.0, 1.0]), torch.arange(2), torch.arange(2)
    )
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 30
    assert bool(logprobs.isnan().all())


def test_greedy_and_sampled_rows_stand_in_one_batch() -> None:
    logits = torch.randn(6, 30)
    temperature = torch.tensor([0.0, 1.0, 0.0, 0.7, 0.0, 1.3])
    seeds, positions = torch.arange(6), torch.arange(6)
    token, logprob = sample(logits, temperature, seeds, positions)
    greedy = temperature == 0
    assert torch.equal(token[greedy], logits.argmax(-1)[greedy])
    expected = torch.log_softmax(logits, -1).gather(1, token[:, None])[:, 0]
    assert torch.allclose(logprob[greedy], expected[greedy], atol=1e-6), "a greedy token's log-prob is at temperature 1"


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(40, 200)
    temperature, seeds, positions = torch.ones(40), torch.arange(40) * 17, torch.arange(40)
    whole, _ = sample(logits, temperature, seeds, positions)
    alone = [sample(logits[i : i + 1], temperature[:1], seeds[i : i + 1], positions[i : i + 1])[0] for i in range(40)]
    assert torch.equal(whole, torch.cat(alone))
