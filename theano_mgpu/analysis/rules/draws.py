"""Random numbers: every replica draws those of the whole batch, and takes its rows where it needs them."""
from theano.sandbox.rng_mrg import mrg_uniform_base
from theano.tensor.raw_random import RandomFunction

from ..shards import rule
from ..states import WHOLE
from .base import constants


@rule(mrg_uniform_base, RandomFunction)
def _draw(shards, node, values):
    values = constants(shards, node, values, 'a parameter of the numbers that it draws is made of samples')
    # In the first stage, not in each one that needs them.
    drawn = [value._replace(stage=max(0, value.stage)) for value in shards.apply(node, values, WHOLE)]
    for value in drawn:
        shards.stages[value.variable] = value.stage
    return drawn


_draw.for_constants = True
