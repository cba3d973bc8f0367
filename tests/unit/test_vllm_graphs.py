"""Which graphs the vLLM engine asks for (engines/vllm); what they compute is shown in tests/vllm on a GPU."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from palingenesis.rl.engines.vllm.core import graph_sizes
from palingenesis.rl.engines.vllm.decode import can_decode
from palingenesis.rl.engines.vllm.graphs import JOINING_TOKENS, can_capture, changed, join_sizes


@pytest.mark.parametrize("seqs", [1, 4, 64, 100, 256, 300, 1000])
def test_every_number_of_sequences_decodes_in_a_graph_that_is_not_much_larger(seqs: int) -> None:
    sizes = graph_sizes(seqs)
    assert sizes == sorted(set(sizes))
    for count in range(1, seqs + 1):
        size = min(n for n in sizes if n >= count and n <= seqs)
        assert size - count < 16


def test_prompts_fit_into_a_graph_beside_every_running_sequence() -> None:
    sizes = join_sizes(256, 32768, 8192)
    assert sizes[-1] == 256 + JOINING_TOKENS
    assert max(b - a for a, b in pairwise(sizes)) <= 16


def test_no_graph_is_captured_with_a_sequence_longer_than_one_may_be_or_a_step_larger_than_one_may_be() -> None:
    for seqs, longest, most in ((256, 128, 8192), (8, 64, 8192), (64, 1024, 300)):
        sizes = join_sizes(seqs, longest, most)
        assert sizes
        assert sizes[-1] <= most
        assert all(n <= seqs or n // seqs + n % seqs <= longest for n in sizes)


def test_a_runner_that_is_not_known_keeps_its_own_graphs() -> None:
    older = SimpleNamespace(cudagraph_dispatcher=object())
    hybrid = SimpleNamespace(cudagraph_manager=object(), model_state=object())
    for runner in (older, hybrid):
        assert not can_capture(runner)
        assert not can_decode(runner)


def test_settings_come_back_after_an_error() -> None:
    settings = SimpleNamespace(sizes=[1], top=1)

    def captured() -> None:
        with changed(settings, sizes=[8], top=8):
            assert settings.top == 8
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="memory"):
        captured()
    assert vars(settings) == {"sizes": [1], "top": 1}
