"""Plans of usual models, made without a device; as a script, this module writes the plans of the guide."""
import contextlib
import importlib.util
import os
import re
import sys

import theano_mgpu as mgpu
from theano_mgpu.devices.context_map import parse_context_map
from theano_mgpu.graph import graph, training_graph
from theano_mgpu.graph.updates import as_dict
from theano_mgpu.options import Options
from theano_mgpu.plan import Machine
from theano_mgpu.runtime.building import divide, plan_of

import numpy as np
import theano
import theano.tensor as T

TWO = parse_context_map('dev0->cuda0;dev1->cuda1')


def planned(inputs, outputs, updates, contexts=TWO, machine=None, params=(), by_nccl=False, **options):
    """Return the plan of a graph for contexts that nothing opens."""
    options = Options(params=[graph.host_view(param) for param in params], **options)
    machine = machine or Machine(replicas=(len(contexts),), update_on=(options.updates_on(contexts)[0],),
                                 against_nccl='' if by_nccl else 'NCCL is not installed')
    divided = divide(inputs, outputs, training_graph.on_host(as_dict(updates)), options, contexts, machine.size)
    return plan_of(divided, options, machine)


def planned_training(inputs, loss, params, updates, **options):
    """Return the plan of a training step."""
    gradients = training_graph.loss_gradients(loss, params)
    return planned(inputs, [loss], training_graph.new_values(updates, gradients, params), params=params, **options)


def demo_cnn():
    """Return the plan of the CNN of examples/theano_cnn.py on two devices."""
    path = os.path.join(os.path.dirname(__file__), '..', '..', 'examples', 'theano_cnn.py')
    spec = importlib.util.spec_from_file_location('theano_cnn', path)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    model = demo.cnn()
    return planned_training(model.inputs, model.loss, model.params, demo.adam, name='demo', by_nccl=True)


def placed_pipeline():
    """Return the plan of four layers on two devices, in four micro-batches."""
    contexts = mgpu.init('dev0->cpu;dev1->cpu')
    rng, x, params = np.random.RandomState(0), T.matrix('x'), []
    h = x
    for i, device in enumerate(['dev0', 'dev0', 'dev1', 'dev1']):
        with mgpu.device(device):
            params.append(theano.shared(rng.randn(64, 64).astype(theano.config.floatX), 'w%d' % i))
            h = T.tanh(T.dot(h, params[-1]))
    return planned_training([x], T.sqr(h).mean(), params, momentum, contexts=contexts, name='pipeline',
                            machine=Machine(), micro_batches=4, update_on='device')


def sharded_update():
    """Return the plan of two dense layers whose update two ranks of two devices each divide."""
    rng, x = np.random.RandomState(0), T.matrix('x')
    params = [theano.shared(rng.randn(100, 100).astype(theano.config.floatX), 'w%d' % i) for i in range(4)]
    h = x
    for param in params:
        h = T.tanh(T.dot(h, param))
    machine = Machine(replicas=(2, 2), update_on=('sharded',) * 2, overlap=(False,) * 2)
    return planned_training([x], T.sqr(h).mean(), params, momentum, machine=machine, update_on='sharded',
                            name='divided')


def resnet():
    """Return the plan of a ResNet-20 in Keras, with exact batch normalisation."""
    from theano_mgpu.graph.updates import first_of_each

    from keras import backend as K
    benchmarks = os.path.join(os.path.dirname(__file__), '..', '..', 'benchmarks')
    with on_path(benchmarks):
        from resnet import resnet
    K.reset_uids()  # the plan has the name of the input, which Keras numbers
    model = resnet(16, 4)
    model.compile('sgd', 'categorical_crossentropy')
    params = model._collected_trainable_weights
    of_metrics = [pair for metric in model._get_training_eval_metrics() for pair in metric.updates]
    updates = first_of_each([*model.updates, *model.optimizer.get_updates(params=params, loss=model.total_loss),
                             *model.state_updates, *of_metrics])
    inputs = [*model._feed_inputs, *model._feed_targets, *model._feed_sample_weights, K.learning_phase()]
    return planned(inputs, [model.total_loss], updates, params=params, name='ResNet-20', by_nccl=True)


def momentum(gradients, params):
    """Return the updates of gradient descent with momentum."""
    updates = []
    for param, gradient in zip(params, gradients):
        velocity = theano.shared(0 * param.get_value(), 'velocity of %s' % param)
        new = 0.9 * velocity - 0.01 * gradient
        updates += [(velocity, T.cast(new, velocity.dtype)), (param, T.cast(param + new, param.dtype))]
    return updates


@contextlib.contextmanager
def on_path(folder):
    """Import from a folder in a ``with`` block."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


GUIDE = {'cnn': demo_cnn, 'resnet': resnet, 'pipeline': placed_pipeline, 'divided': sharded_update}


def write(path):
    """Write the plans of the guide into its page."""
    os.environ['COLUMNS'] = '118'
    with open(path) as file:
        page = file.read()
    with theano.configparser.change_flags(floatX='float32'):
        for name, make in GUIDE.items():
            before, block, after = re.split(r'(?s)(```text plan=%s\n.*?```)' % name, page)
            page = '%s%s\n%s\n```%s' % (before, block.partition('\n')[0], make(), after)
    with open(path, 'w') as file:
        file.write(page)


if __name__ == '__main__':
    write(os.path.join(os.path.dirname(__file__), '..', '..', 'docs', 'guide', 'plans.md'))
