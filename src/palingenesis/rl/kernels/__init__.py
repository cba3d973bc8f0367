"""The head: log-probs and entropy of sampled tokens from hidden states, without the logits ever standing in memory.

`head.py` chooses the implementation; `reference.py` is the ground truth the tests compare with.
"""

from palingenesis.rl.kernels.head import selected_logprobs

__all__ = ["selected_logprobs"]
