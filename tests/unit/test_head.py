"""The sliced head against whole logits: values, exact gradients, memory, precision, extreme logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from palingenesis.rl.kernels import head
from palingenesis.rl.kernels.head import budget_rows, selected_logprobs
from palingenesis.rl.kernels.reference import reference_logprobs

VARIANTS: list[dict[str, float]] = [{}, {"softcap": 2.0}, {"scale": 0.25}, {"softcap": 3.0, "scale": 1.5}]


def inputs(
    n: int, h: int, v: int, dtype: torch.dtype = torch.float64, seed: int = 0, spread: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, targets, and the gradient that comes back to each log-prob."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias = spread * normal(n, h), normal(v, h), normal(v)
    targets = torch.randint(0, v, (n,), generator=generator)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    return leaves[0], leaves[1], leaves[2], targets, normal(n)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("slice_rows", [1, 4, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_whole_logits(
    variant: dict[str, float], temperature: float, slice_rows: int, with_bias: bool
) -> None:
    hidden, weight, bias, targets, upstream = inputs(13, 6, 17)
    given_bias = bias if with_bias else None
    wanted = [hidden, weight, bias] if with_bias else [hidden, weight]
    logp, entropy = selected_logprobs(
        hidden, weight, given_bias, targets, temperature, slice_rows=slice_rows, **variant
    )
    truth, truth_entropy = reference_logprobs(hidden, weight, given_bias, targets, temperature, **variant)
    torch.testing.assert_close(logp, truth, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(entropy, truth_entropy, rtol=1e-13, atol=1e-13)
    assert not entropy.requires_grad
    mine = torch.autograd.grad((logp * upstream).sum(), wanted)
    theirs = torch.autograd.grad((truth * upstream).sum(), wanted)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_finite_differences(variant: dict[str, float]) -> None:
    hidden, weight, bias, targets, _ = inputs(5, 3, 7)
    assert torch.autograd.gradcheck(
        lambda *x: selected_logprobs(*x, targets, 0.7, slice_rows=2, **variant)[0], (hidden, weight, bias)
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 9), st.integers(1, 12), st.integers(1, 5), st.integers(0, 1000))
def test_the_slice_size_changes_nothing(rows: int, vocabulary: int, slice_rows: int, seed: int) -> None:
    hidden, weight, bias, targets, upstream = inputs(rows, 4, vocabulary, seed=seed)
    results = []
    for size in (slice_rows, 0):
        logp, entropy = selected_logprobs(hidden, weight, bias, targets, 0.9, slice_rows=size)
        gradients = torch.autograd.grad((logp * upstream).sum(), [hidden, weight, bias])
        results.append([logp, entropy, *gradients])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, bias, targets, _ = inputs(6, 4, 9)
    logp, _ = selected_logprobs(hidden, weight.detach(), bias.detach(), targets, 1.0)
    logp.sum().backward()
    assert hidden.grad is not None
    logp, _ = selected_logprobs(hidden.detach(), weight, None, targets, 1.0)
    logp.sum().backward()
    assert weight.grad is not None
    assert not selected_logprobs(hidden.detach(), weight.detach(), None, targets, 1.0)[0].requires_grad


class Largest(TorchDispatchMode):
    """Remembers the most elements any operation's result had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(result, Tensor):
                self.elements = max(self.elements, result.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_slice(dtype: torch.dtype) -> None:
    rows, hidden_size, vocabulary, slice_rows = 640, 8, 1000, 16
    hidden, weight, bias, targets, _ = inputs(rows, hidden_size, vocabulary, dtype)
    with Largest() as seen:
        logp, _ = selected_logprobs(hidden, weight, bias, targets, 0.8, slice_rows=slice_rows)
        (logp * 0.5).sum().backward()
    assert seen.elements == slice_rows * vocabulary
    with Largest() as whole:  # the mode does see whole logits
        reference_logprobs(hidden, weight, bias, targets, 0.8)
    assert whole.elements == rows * vocabulary


def test_the_budget_decides_the_rows() -> None:
    assert budget_rows(248_320, "cpu") == 64
    assert budget_rows(248_320, "cuda") == 512
    assert budget_rows(10**9, "cpu") == 1
    assert 4 * budget_rows(151_936, "cuda") * 151_936 <= 512 * 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_float32_log_probs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 over the same rounded inputs; logits rounded to bf16 would be off by 0.1 here."""
    monkeypatch.setattr(head, "WIDEN_ROWS", 100)  # several blocks of vocabulary, the last one partial
    hidden, weight, bias, targets, upstream = inputs(96, 64, 430, dtype, spread=0.6)
    logp, entropy = selected_logprobs(hidden, weight, bias, targets, 0.9, slice_rows=7)
    mine = torch.autograd.grad((logp * upstream).sum(), [hidden, weight, bias])
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    truth, truth_entropy = reference_logprobs(wide[0], wide[1], wide[2], targets, 0.9)
    theirs = torch.autograd.grad((truth * upstream).sum(), wide)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp.double(), truth, rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy.double(), truth_entropy, rtol=0, atol=2e-5)
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == dtype
        # Rounded once, at the end: no entry is off by more than half a unit in the last place, and a little.
        torch.testing.assert_close(a.double(), b, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5)


def test_a_sum_over_slices_does_not_lose_small_terms() -> None:
    """2,000 equal contributions to dW: a bf16 sum stands still once a term is under half its last place."""
    rows = 2000
    hidden = torch.full((rows, 1), 0.5, dtype=torch.bfloat16)
    weight = torch.zeros(4, 1, dtype=torch.bfloat16, requires_grad=True)
    logp, _ = selected_logprobs(hidden, weight, None, torch.zeros(rows, dtype=torch.int64), 1.0, slice_rows=1)
    logp.sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == pytest.approx([750, -250, -250, -250], rel=4e-3)


def test_a_float32_weight_serves_bf16_hidden_states() -> None:
    hidden, weight, _, targets, _ = inputs(9, 8, 20, torch.bfloat16)
    master = weight.detach().float().requires_grad_()
    selected_logprobs(hidden, master, None, targets, 1.0, slice_rows=4)[0].sum().backward()
    selected_logprobs(hidden, weight, None, targets, 1.0, slice_rows=4)[0].sum().backward()
    assert master.grad is not None
    assert weight.grad is not None
    assert master.grad.dtype == torch.float32
    torch.testing.assert_close(master.grad.bfloat16(), weight.grad)


@pytest.mark.parametrize("spread", [1e3, 1e6])
def test_extreme_logits_stay_finite(spread: float) -> None:
    hidden, weight, bias, targets, _ = inputs(12, 4, 9, torch.float32, spread=spread)
    logp, entropy = selected_logprobs(hidden, weight, bias, targets, 0.5, slice_rows=5)
    logp.sum().backward()
    assert logp.min() < -1000
    for tensor in (logp, entropy, hidden.grad, weight.grad):
        assert tensor is not None
        assert torch.isfinite(tensor).all()
    assert (entropy >= 0).all()


def test_a_certain_token_has_log_prob_zero() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[200.0], [0.0]])
    logp, entropy = selected_logprobs(hidden, weight, None, torch.tensor([0]), 1.0)
    assert logp.tolist() == [0.0]
    assert entropy.tolist() == [0.0]


def test_greedy_has_no_temperature_here() -> None:
    hidden, weight, _, targets, _ = inputs(2, 3, 4)
    with pytest.raises(ValueError, match="above 0"):
        selected_logprobs(hidden, weight, None, targets, 0.0)
