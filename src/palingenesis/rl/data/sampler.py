"""Which prompts come next.

    rows ── epoch e: shuffled by (seed, e) ──> draw(n) ──> ... ──> observe(id, mean reward) retires what is learned

Invariants: the order of an epoch is a function of seed and epoch number alone, so a saved state is a few numbers, the
retired ids and the rows whose groups nobody has had yet, which a restored sampler draws first; every row that is not
retired comes up exactly once an epoch; a restored sampler continues with the very next row; a state is only taken back by
a sampler over the same rows in the same order. Copies of a row are separate draws and retire together.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from palingenesis.rl.errors import CheckpointError, DataError
from palingenesis.rl.types import Row

_ROUNDING = 1e-9  # a mean of eight 0.9s need not be 0.9


class Sampler:
    """Draws rows epoch by epoch.

    Args:
        rows: what to draw from; not empty.
        seed: decides the order of every epoch.
        retire_above: a prompt whose group's mean reward reaches this is not drawn again; 0 never retires.
    """

    def __init__(self, rows: Sequence[Row], seed: int, retire_above: float = 0.0) -> None:
        if not rows:
            raise DataError("there are no rows to draw from; check data.dataset.")
        self._rows = tuple(rows)
        self._seed = seed
        self._retire_above = retire_above
        self._copies = Counter(row.id for row in self._rows)
        self._retired: set[str] = set()
        self._active = len(self._rows)
        self._fingerprint = ""
        self._again: deque[Row] = deque()
        self._start_epoch(0)

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._epoch

    @property
    def retired(self) -> int:
        """Prompts retired so far; copies count once."""
        return len(self._retired)

    @property
    def remaining(self) -> int:
        """Rows that are not retired, copies counted."""
        return self._active

    def draw(self, n: int) -> list[Row]:
        """The next `n` rows.

        Raises:
            DataError: every prompt is retired.
        """
        return [self._next() for _ in range(n)]

    def observe(self, row_id: str, mean_reward: float) -> bool:
        """Tell how a prompt's group did; True when this retires it."""
        if self._retire_above <= 0 or mean_reward < self._retire_above - _ROUNDING or row_id in self._retired:
            return False
        if row_id not in self._copies:
            raise ValueError(f"row {row_id!r} is not one of this sampler's")
        self._retire(row_id)
        return True

    def state_dict(self, unused: Iterable[Row] = ()) -> dict[str, Any]:
        """Everything needed to continue, JSON-able.

        Args:
            unused: rows drawn whose groups are still under way, in the order drawn; they are drawn again first.
        """
        again = [id(row) for row in (*unused, *self._again)]
        places = {id(row): place for place, row in enumerate(self._rows)} if again else {}
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "again": [places[row] for row in again],
            "retired": sorted(self._retired),
            "rows": len(self._rows),
            "fingerprint": self._row_fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            CheckpointError: the state is damaged, or of another seed or data set.
        """
        try:
            seed, epoch, position = (int(state[key]) for key in ("seed", "epoch", "position"))
            retired, count, fingerprint = set(state["retired"]), int(state["rows"]), str(state["fingerprint"])
            again = [int(place) for place in state.get("again", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the sampler's state in the checkpoint is damaged ({type(error).__name__}: {error}); use an older one."
            ) from None
        if fingerprint != self._row_fingerprint():
            raise CheckpointError(
                f"the training rows are not those of the checkpoint ({count} rows then, {len(self._rows)} now): "
                "restore the data set and the data options, or start a new run with another train.output_dir."
            )
        if seed != self._seed:
            raise CheckpointError(f"data.seed is {self._seed}, and the checkpoint was drawn with {seed}: set it back.")
        self._again = deque(self._rows[place] for place in again)
        self._retired.clear()
        self._active = len(self._rows)
        self._start_epoch(epoch)
        self._position = position
        for row_id in retired:
            self._retire(row_id)

    def _next(self) -> Row:
        if not self._active:
            raise DataError(
                f"all {self.retired} prompts are retired: every one reached data.retire_above ({self._retire_above}). "
                "The policy has learned this data set: stop here, add harder rows, or raise data.retire_above."
            )
        while self._again:
            if (row := self._again.popleft()).id not in self._retired:
                return row
        while True:
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1)
            row = self._rows[self._order[self._position]]
            self._position += 1
            if row.id not in self._retired:
                return row

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        self._order = array("L", range(len(self._rows)))
        random.Random(f"{self._seed}/{epoch}").shuffle(self._order)

    def _retire(self, row_id: str) -> None:
        self._retired.add(row_id)
        self._active -= self._copies[row_id]

    def _row_fingerprint(self) -> str:
        """SHA-256 over ids, prompts and columns in order; made once, when first asked for."""
        if not self._fingerprint:
            digest = hashlib.sha256()
            for row in self._rows:
                content = [row.id, [message.to_dict() for message in row.messages], row.columns, row.tools]
                digest.update(json.dumps(content, sort_keys=True, default=str).encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint
