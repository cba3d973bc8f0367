"""Draw the next token of each row and take its log-prob in the same pass.

    u(seed, position) in [0, 1)           a hash of what is drawn, so a draw repeats whatever shares its batch
    token = inverse CDF of softmax(z / T) at u;   logprob = log softmax(z / T)[token]

Temperature 0 takes the argmax, with the log-prob at temperature 1. On a GPU `sample_triton` reads the logits once and the
drawn block once more; what stands here is the definition, and the path of the CPU.

The inverse CDF needs one uniform number a row where Gumbel noise needs one a vocabulary entry, and costs no exp or log
beyond the softmax's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: 2^64 over the golden ratio
_MIX = (-4658895280553007687, -7723592293110705685)  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`(tokens int64 [n], logprobs float32 [n])`. Of NaN logits the log-prob is NaN and the token one of the vocabulary, so
    that the trainer, which refuses such a log-prob, is reached.

    Args:
        logits: [n, V]; -inf marks tokens that cannot be drawn.
        temperature: float32 [n], 0 for greedy rows.
        seeds: int64 [n], one a request.
        positions: integer [n], the place of the drawn token in its sequence.
    """
    if logits.is_cuda:
        from palingenesis.rl.kernels.sample_triton import sample as fused

        return fused(logits, temperature, seeds, positions)
    return sample_reference(logits, temperature, uniform(seeds, positions))


def sample_reference(logits: Tensor, temperature: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """The same at given uniform numbers `draws` float64 [n], in plain torch; the CDF is float64, because in float32 the
    tail of a large vocabulary has no mass."""
    greedy = temperature == 0
    inverse = torch.where(greedy, 1.0, 1.0 / temperature).unsqueeze(1)
    logprobs = torch.log_softmax(logits.float() * inverse, dim=-1)
    best = logits.argmax(-1, keepdim=True)
    if bool(greedy.all()):
        return best[:, 0], logprobs.gather(1, best)[:, 0]
    cdf = logprobs.double().exp().cumsum(-1)
    total = cdf[:, -1:]
    # Below the whole mass, whatever the sum rounded to: the entry that passes it is one of the vocabulary, with mass.
    target = torch.minimum(draws.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.where(greedy.unsqueeze(1), best, torch.searchsorted(cdf, target, right=True))
    token = token.clamp_max_(logits.shape[-1] - 1)  # NaN is passed by nothing
    return token[:, 0], logprobs.gather(1, token)[:, 0]


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 [n] in [0, 1): SplitMix64 (Steele, Lea and Flood 2014) of seed + position · golden, its upper 53 bits."""
    z = seeds + (positions.to(torch.int64) + 1) * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX[0]
    z = (z ^ _shift(z, 27)) * _MIX[1]
    return _shift(z ^ _shift(z, 31), 11).double() * 2.0**-53


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, which torch lacks."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
