"""A sum over the contexts of a map, the argument, compared with NumPy: a program that prints a Finding as JSON."""
from __future__ import annotations

import json
import sys
import warnings

from ...devices.contexts import card_of, init
from ...devices.first_exchange import CAUSE, forget
from ...utils.values import wrong
from ..output import quietly
from .host_checks import FAIL, OK, SKIP, WARN, Finding, random_matrices

MARK = 'finding: '
REMEDY = 'Set mgpu.collectives=host, and try again'


def check(contexts: str) -> Finding:
    """Compare the sum, and say whether NCCL or the host adds it; NCCL is tried again where it did not work before."""
    import theano.tensor as T

    from ... import function
    from ...devices.nccl import BY_FLAG  # imports Theano, which may be broken: then the doctor says so
    a, _ = random_matrices()
    x = T.fmatrix('x')
    with warnings.catch_warnings(record=True) as caught, quietly():
        warnings.simplefilter('always')
        forget([('', card_of(context)) for context in init(contexts)])
        f = function([x], T.dot(x.T, x), executor='serial')
        result = f(a)
    fault = wrong(result, a.T.dot(a), 1e-3, 1e-3)
    if fault:
        return Finding(FAIL, 'dot(x.T, x) ' + fault, REMEDY)
    choice = next((choice for choice in f.plan.choices if choice.what == 'collectives'), None)
    problems = [str(each.message).partition('. From now on')[0] for each in caught if 'NCCL' in str(each.message)]
    if choice is None:
        return Finding(SKIP, 'sums go through the host: no CUDA device is among the contexts')
    if choice.chosen != 'the host' and not problems:
        return Finding(OK, 'NCCL adds sums between %s, as NumPy does' % ', '.join(each.name for each in f.contexts))
    reason = ' '.join(problems) or choice.reason
    if reason == BY_FLAG:
        return Finding(OK, 'sums go through the host: ' + reason)
    short = reason.replace('. ' + CAUSE, '')  # else NCCL hangs
    return Finding(WARN, 'sums go through the host, which takes longer: ' + short,
                   CAUSE if short != reason else 'NCCL needs a CUDA device of its own for each context')


if __name__ == '__main__':
    print(MARK + json.dumps(check(sys.argv[1])))
