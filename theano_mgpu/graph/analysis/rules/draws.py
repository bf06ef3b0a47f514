"""Random numbers: every replica draws the numbers of the whole batch."""
import theano.tensor as T
from theano.sandbox.multinomial import MultinomialFromUniform

from ...random_streams import DRAWS
from ..known import number
from ..shards import rule
from ..states import CONSTANT, DEPENDENT, ROWS, WHOLE, rows
from .base import constants, only_rows_on

MADE_OF_SAMPLES = 'how many numbers it draws, or its random state, is made of samples'


@rule(*DRAWS, of=CONSTANT)
def _draw(shards, node, values):
    state, size = constants(shards, node, values[:2], MADE_OF_SAMPLES)
    parameters = shards.wholes(values[2:])
    of_samples = any(value.kind == ROWS or value.state.size is not None for value in parameters)
    drawn = shards.apply(node, [state, size] + list(map(shards.gathered, parameters)),
                         DEPENDENT if of_samples else WHOLE)
    # Numbers are drawn once, in the first stage, and saved for the stages that need them.
    shards.stages.update((variable, max(0, shards.stage(variable))) for variable, _ in drawn)
    return drawn


@rule(MultinomialFromUniform, of=ROWS)
def _chosen(shards, node, values):
    """Draw for each sample by its own probabilities, n times; the first draw of all samples comes first."""
    times = number(node.inputs[2]) if len(values) > 2 else 1
    if times is None or values[1].kind == ROWS and times != 1:
        shards.refuse(node, 'it draws several times for each sample, from numbers that lie in another order')
    only_rows_on(shards, node, values[:2], 0)
    outers = None, None if times == 1 else T.constant(int(times))
    p, uniform = [shards.cut(value, 0, outer) if value.kind == CONSTANT else value
                  for value, outer in zip(values, outers)]
    return shards.apply(node, [p, uniform] + values[2:], rows())
