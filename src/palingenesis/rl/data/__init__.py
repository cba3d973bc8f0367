"""Rows: from a file or the hub to prompts in drawing order.

    load ──RawRow──> formats (chat, ...) ──Row──> prompts.build (limits, held-out split) ──RowSet──> Sampler.draw

Nothing here knows a tokenizer or a model: whoever wants prompts measured hands in a function that counts.
"""

from palingenesis.rl.data.load import RawRow, load
from palingenesis.rl.data.prompts import Dropped, RowSet, build, check_verifiers
from palingenesis.rl.data.sampler import Sampler

__all__ = ["Dropped", "RawRow", "RowSet", "Sampler", "build", "check_verifiers", "load"]
