"""The activities of a rank that comes to a handshake, as numbers, and in words for messages."""
from __future__ import annotations

from typing import Sequence

# The first number of an activity. In CALL, COMPARE, INPUTS and CHECK the number of a function follows, then the number
# of its calls before.
END, BUILD, COMPILE, SHARE, CALL, ADD, GATHER, AGREE, FAILED, READ, COMPARE, FEED, INPUTS, CHECK = range(14)

# While one rank compiles, or reads a file, the others wait for longer than in a step: PATIENT times the limit.
SLOW = (END, BUILD, COMPILE, SHARE, COMPARE, FEED, INPUTS)
PATIENT = 10


def describe(activity: Sequence[int], functions: Sequence[str]) -> str:
    """Return the activity of a rank, at most three numbers as for `END`, in words."""
    kind, number, calls = (*map(int, activity), 0, 0)[:3]
    name = functions[number] if number < len(functions) else 'a function unknown here'
    function = '%s (number %d)' % (name, number)
    return {END: 'at its end', BUILD: 'building a function', COMPILE: 'compiling in turn', SHARE: 'sharing values',
            CALL: 'in call %d of %s' % (calls + 1, function), ADD: 'adding up what each rank has computed',
            GATHER: 'gathering the rows of a batch', AGREE: 'at the end of a step',
            FAILED: 'in a step that has failed', FEED: 'at a batch that rank 0 makes for all',
            COMPARE: 'comparing the results of %s that each rank has computed whole, after call %d'
                     % (function, calls),
            INPUTS: 'comparing the inputs of call %d of %s' % (calls + 1, function),
            CHECK: 'comparing the copies of values before call %d of %s' % (calls, function),
            READ: "reading a value of which each rank has a part (update_on='sharded')"}[kind]
