"""Random numbers of a whole batch, drawn once for all shards of a replica."""
from __future__ import annotations

import theano
from theano.gof.graph import ancestors, io_toposort

from .graph import substitute
from .partition import Program, Stage
from .random_streams import DRAWS


def drawn_once(program: Program) -> Program:
    """Return a program with a first stage that draws the numbers of the whole batch, where the program draws any.

    Further functions of these numbers, such as the mask of a dropout, belong to this stage, too, as long as no value of
    a shard takes part. Without the stage, each shard of a replica draws all numbers, and uses its own.
    """
    sources = program.in_stages
    late = {each.variable for each in program.every_exchange}  # and later, all that is made of these
    late.update(placeholder for stage in program.stages for placeholder in stage.saved)
    of_shard = {*program.inputs, *program.numbers[1:], *late}
    drawn: set[theano.Variable] = set()
    nodes = io_toposort([], sources)
    for node in nodes:
        # The shape of a draw is the shape of the whole batch, although the graph makes it of the shape of a shard.
        is_draw = isinstance(node.op, DRAWS)
        if late.intersection(node.inputs):
            late.update(node.outputs)
            of_shard.update(node.outputs)
        elif is_draw or drawn.intersection(node.inputs) and not of_shard.intersection(node.inputs):
            drawn.update(node.outputs)
        elif of_shard.intersection(node.inputs):
            of_shard.update(node.outputs)
    read = {variable for node in nodes if of_shard.intersection(node.outputs) for variable in node.inputs}
    first = [variable for node in nodes for variable in node.outputs
             if variable in drawn and (variable in read or variable in sources)]
    if not first:
        return program
    placeholders = {variable: variable.type(variable.name) for variable in first}
    others = [variable for variable in sources if variable not in first]
    program = program.renamed(dict(zip(others, substitute(others, placeholders))))
    stages = [Stage([], {}, first, once=True)]
    for stage in program.stages:
        outputs = [variable for variable in stage.outputs if variable not in first]
        leaves = set(ancestors(outputs))
        saved = {placeholder: variable for variable, placeholder in placeholders.items() if placeholder in leaves}
        stages.append(stage._replace(outputs=outputs, saved={**stage.saved, **saved}))
    return program._replace(stages=stages)
