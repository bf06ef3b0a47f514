"""The communicator of one process alone."""
from typing import List, Optional, Sequence

import numpy as np

from .communicator import Communicator

_NO_INTEGERS = np.empty((1, 0), 'int64')


class Alone(Communicator):
    """One process alone: a collective over it has nothing to do."""

    def __init__(self) -> None:
        super().__init__(0, 1, [''])

    def handshake(self, activity: Sequence[int], integers: Sequence[int] = ()) -> np.ndarray:
        return np.array([integers], 'int64') if len(integers) else _NO_INTEGERS

    def announce_failure(self, error: BaseException, of_step: bool) -> BaseException:
        return error

    def check_threads(self) -> None:
        pass

    def all_reduce(self, arrays: Sequence[np.ndarray]) -> None:
        pass

    def reduce_scatter(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> List[Optional[np.ndarray]]:
        return list(arrays)

    def all_gather(self, rows: np.ndarray, out: np.ndarray, lengths: Sequence[int]) -> None:
        out[...] = rows

    def all_gather_owned(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> List[Optional[np.ndarray]]:
        return [None] * len(arrays)

    def all_to_all(self, messages: Sequence[np.ndarray], lengths: Sequence[int]) -> List[np.ndarray]:
        return list(messages)

    def broadcast(self, arrays: Sequence[np.ndarray], root: int = 0) -> None:
        pass
