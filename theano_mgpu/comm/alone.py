"""The communicator of one process alone."""
from __future__ import annotations

from typing import Sequence

import numpy as np

from .communicator import Communicator


class Alone(Communicator):
    """One process alone: a collective over it has nothing to do."""

    def __init__(self) -> None:
        super().__init__(0, 1, [''])

    def handshake(self, activity: Sequence[int], integers: Sequence[int] = ()) -> np.ndarray:
        return np.array([integers], 'int64')

    def announce_failure(self, error: BaseException, of_step: bool) -> BaseException:
        return error

    def check_threads(self) -> None:
        pass

    def all_reduce(self, arrays: Sequence[np.ndarray]) -> None:
        pass

    def reduce_scatter(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> list[np.ndarray | None]:
        return list(arrays)

    def all_gather(self, rows: np.ndarray, out: np.ndarray, lengths: Sequence[int]) -> None:
        out[...] = rows

    def all_gather_owned(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> list[np.ndarray | None]:
        return [None] * len(arrays)

    def all_to_all(self, messages: Sequence[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
        return list(messages)

    def broadcast(self, arrays: Sequence[np.ndarray], root: int = 0) -> None:
        pass
