"""A callable in place of a function that Theano or Keras makes: each call is computed in the fastest of its ways."""
from __future__ import annotations

import functools
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, NamedTuple, Optional, Sequence

from ..checks.ledger import Account
from ..comm.alone import is_alone
from ..comm.communicator import Communicator
from ..runtime.call_hooks import CallHooks, Computed
from .choice import STILL_TIMED, Chooser, LengthChooser, Treatment, Way
from .fallback import by_plain


class LeaveToPlain(NamedTuple):
    """The outcome of a call that was not computed over contexts; nothing was changed.

    ``then()`` is called once the call was computed in another way. The `failure` is the error of a call that failed.
    """

    then: Callable[[], object]
    failure: Optional[Exception] = None


class BatchSource:
    """The knowledge of the batch of a function, and its programs over contexts; a `call` has the arguments of a call.

    This one knows of no batch, and calls a function as it is: hooks may surround its calls.
    """

    ranks = Communicator()  # the processes that choose alike

    def __init__(self, plain_call: Callable[..., Any]) -> None:
        self.plain_call = plain_call

    def ways(self) -> Iterator[Way]:
        """Yield the ways to compute calls, in the order in which they are timed."""
        yield Way.HOST

    def length(self, call: Any) -> int:
        """Return the number of samples of a call, as far as it is known at once; 0 if it is not."""
        return 0

    def plain(self, call: Any) -> Computed:
        """Compute a call by Theano's own function."""
        args, kwargs = call
        return Computed(self.plain_call(*args, **kwargs))

    def over_contexts(self, call: Any, way: Way) -> Computed | LeaveToPlain:
        """Compute a call on one device or on several; raise an error that plain Theano does not explain."""
        raise NotImplementedError

    def copied(self, function: Any, swap: Any, delete_updates: bool) -> None:
        """Have a copy of the function, see `Function.copy`, computed in the same ways."""

    def alone(self, call: Any) -> Computed:
        """Compute a call in this process alone."""
        return self.plain(call)

    def alike(self, call: Any, is_open: bool) -> Any:
        """Return a call as all ranks have it, where they choose alike."""
        return call

    def counts(self, call: Any) -> bool:
        """Return whether the time of a call counts for the choice."""
        return True

    def patience(self) -> float:
        """Return the seconds of calls on the host before a program for other ways is compiled."""
        return 0

    def may_grow(self) -> bool:
        """Return whether some of the calls that are faster on the host are timed again later."""
        return False

    def chosen(self, chooser: Chooser) -> None:
        """Note that a way was chosen, for some length; this is the Chooser of the longest batches that has chosen."""

    def closed(self, why: str, last: Way) -> None:
        """Note why a way is closed, and the way with the most devices that is left."""


class Dispatched:
    """A callable in place of a function that Theano or Keras makes.

    Each call is computed on the host, on one device or on several: in the fastest way, by the length of the batch. With
    `always` it is the last of the ways that there are, without timing. A call that a way cannot compute, or that fails,
    is left to the next best way; if Theano's own function fails, too, that is the error.

    Attributes
    ----------
    source : BatchSource
    hooks : CallHooks
        Those that surround each call.
    always : bool
        Whether no call is timed.
    closed : dict of Way to str
        The ways in which no call is computed, each with the reason.
    """

    def __init__(self, source: BatchSource, always: bool, inner: Sequence[Callable[..., Computed]] = (),
                 account: Account | None = None) -> None:
        self.source, self.always = source, always
        self.closed: Dict[Way, str] = {}
        self.choice = LengthChooser(self.ways, source.ranks, source.patience)
        self.hooks = CallHooks(self._compute, inner, account=account)
        self._lock = threading.RLock()
        self._last = Way.HOST  # what `last_way` returned last
        self._why_whole = ''   # of the last step that has stayed whole
        self._quiet = 0  # calls to come on the host that are not timed, unless they are longer

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if self._quiet and self.source.length((args, kwargs)) < self.choice.whole_below:
            self._quiet -= 1
            return self.source.plain_call(*args, **kwargs)
        return self.hooks.run((args, kwargs)).outputs

    def copied(self, function: Any, swap: Any, delete_updates: bool) -> None:
        """Run a copy of the function in the same ways; it has lines of its own in a ledger if it has updates."""
        self.source.copied(function, swap, delete_updates)
        if self.hooks.account is not None and not delete_updates:
            dispatched_of(function).hooks.record(self.hooks.account.of_copy(function.mgpu_name, swap or {}))

    def ways(self) -> Iterable[Way]:
        """Yield the ways that are not closed, in the order in which they are timed."""
        return (way for way in self.source.ways() if way not in self.closed)

    def close(self, way: Way, why: str) -> None:
        """Compute no call in a way from now on."""
        self.closed[way], self._last = why, Way.HOST
        self.choice.leave(way)
        self.source.closed(why, self.last_way())

    def why_closed(self) -> str:
        """Return the reasons why calls are not computed in some of the ways."""
        return '; '.join(dict.fromkeys(self.closed.values()))

    def reason(self, chooser: Chooser, why_not_divided: str) -> str:
        """Return why a way was chosen, see `LengthChooser.reason`; of the host, also that processes are slower."""
        return self.choice.reason(chooser, why_not_divided, self._why_whole * (chooser.way is Way.HOST))

    def so_far(self, how: str) -> str:
        """Return how calls are computed, in words, with a note that they are still being timed if no way is chosen."""
        return how if self.always or self.choice.has_chosen() else how + STILL_TIMED

    def last_way(self) -> Way:
        """Return the way with the most devices."""
        if self._last is Way.HOST:  # another one may be open by now
            ways = set(self.ways())
            self._last = next(way for way in (Way.SEVERAL, Way.DEVICE, Way.HOST) if way in ways)
        return self._last

    def begin_replay(self, replay: Callable[..., Computed]) -> None:
        """Put the hook of a checkpoint before the others, and time no call: a restart must not depend on timings."""
        self._before = self.hooks, self.always
        self.hooks, self.always = CallHooks(self._compute, self.hooks.inner, [replay], self.hooks.account), True

    def end_replay(self) -> None:
        """Take the hook of a checkpoint out again."""
        self.hooks, self.always = self._before

    def _compute(self, call: Any) -> Computed:
        if is_alone():
            return self.source.alone(call)
        if self.always:
            return self._in(call, self.last_way())[0]
        samples, own = self.source.length(call), call
        if self.choice.settled(samples) is Way.HOST and self.source.ranks.size == 1:
            return self.source.plain(call)
        call = self.source.alike(call, self.choice.is_open(samples))
        if call is not own:  # the length of rank 0's batch counts for all
            samples = self.source.length(call)
        chooser = self.choice.chooser(samples)
        before = chooser.way, chooser.state
        computed = self.choice.run(samples, functools.partial(self._in, call))
        if before != (chooser.way, chooser.state):
            if (chooser.way, chooser.state) == (Way.HOST, Treatment.SETTLED) and self.source.may_grow():
                chooser.rest()
            longest = self.choice.of_longest()
            if chooser.state is not Treatment.TIMES and longest is not None:
                self.source.chosen(longest)
        if chooser.state is Treatment.RESTS and not self._quiet and not self.hooks.are_any:
            self._quiet = chooser.skip_quiet_calls()
        return computed

    def _in(self, call, way):
        """Compute a call in a way; return the results, and whether the time of the call counts, see `Chooser.run`."""
        if way is Way.HOST:
            return self.source.plain(call), self.source.counts(call)
        # One line, because Ctrl-C may raise between two lines, after the lock is taken and before `with` can free it.
        with self._lock: return self._over_contexts(call, way)  # noqa: E701

    def _over_contexts(self, call, way):
        outcome = self.source.over_contexts(call, way)
        if isinstance(outcome, LeaveToPlain):
            return self._in_another_way(call, way, outcome), None if outcome.failure is None else False
        step = outcome.step
        if step is not None and step.why_whole:
            self._why_whole = step.why_whole
            return outcome, None  # plain Theano computes it with less ado
        return outcome, self.source.counts(call) and (step is None or step.is_settled)

    def _in_another_way(self, call, way, left):
        """Compute a call that was left: on one device if that is faster, by Theano's own function after an error."""
        plain = functools.partial(self.source.plain, call)
        if way is Way.DEVICE and getattr(left.failure, 'out_of_memory', False) and Way.SEVERAL in self.ways():
            self.choice.divide(self.source.length(call))  # several contexts have more memory
            computed = self._over_contexts(call, Way.SEVERAL)[0]
        elif left.failure is not None:
            computed = by_plain(plain, left.failure, self.source.ranks)
        elif way is Way.SEVERAL and Way.DEVICE in self.ways() and self._prefers_device(call):
            computed = self._over_contexts(call, Way.DEVICE)[0]
        else:
            computed = plain()
        left.then()
        return computed

    def _prefers_device(self, call):
        seconds = self.choice.chooser(self.source.length(call)).seconds
        return self.always or seconds.get(Way.DEVICE, 1) < seconds.get(Way.HOST, 0)


def dispatched_of(function: Any) -> Dispatched:
    """Return the Dispatched in place of a `theano.function`, made if there is none."""
    if function.mgpu_divided is None:
        function.mgpu_divided = Dispatched(BatchSource(function.plain_call), always=True)
    return function.mgpu_divided


def leave_to_plain(function: Any) -> None:
    """Have Theano make all calls of a function from now on, unless hooks surround them."""
    if function.mgpu_divided is not None and not function.mgpu_divided.hooks.are_any:
        del function.mgpu_divided
