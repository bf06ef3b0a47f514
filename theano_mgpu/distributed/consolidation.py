"""Variables whose latest values are divided among the ranks, and how every rank gets the whole of them."""
from typing import Callable, Dict


class DividedStates:
    """The states that are divided among ranks, of which each rank has the latest values of its share alone.

    A state stands here as the function that gathers it. All ranks add and remove the same states in the same order.
    """

    def __init__(self) -> None:
        self._gathers: Dict[Callable[[], None], None] = {}  # a set in the order of insertion

    def add(self, gather: Callable[[], None]) -> None:
        """Note that a state is divided until all ranks call `gather`, a function that calls `remove`."""
        self._gathers[gather] = None

    def remove(self, gather: Callable[[], None]) -> None:
        """Note that every rank has the latest values again."""
        self._gathers.pop(gather, None)

    def consolidate(self) -> None:
        """Give every rank the latest values of all states. Every rank has to make the call."""
        for gather in list(self._gathers):
            gather()
