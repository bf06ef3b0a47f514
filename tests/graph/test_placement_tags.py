"""The place of each op of a graph: blocks, gradients beside their forward ops, and propagation."""
import copy
import pickle
import threading
import time
from collections import OrderedDict

import theano_mgpu as mgpu
from theano_mgpu.graph.graph import checksum, shared_variables
from theano_mgpu.graph.placement import propagation
from theano_mgpu.graph.placement.propagation import is_placed
from theano_mgpu.graph.placement.tags import Beside, place_of, place_of_node, placed_on

import keras
import numpy as np
import pytest
import theano
import theano.tensor as T
from keras import backend as K
from support.processes import python
from theano.gof.graph import Apply, ancestors, io_toposort
from theano.ifelse import ifelse
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.nnet import bn, conv2d
from theano.tensor.signal.pool import pool_2d

FLOAT = theano.config.floatX


@pytest.fixture(autouse=True)
def two(contexts):
    contexts('cpu')
    return mgpu.init('dev0->cpu;dev1->cpu')


def parameter(*shape, name=None):
    return theano.shared(np.full(shape, 0.1, FLOAT), name)


def nodes_of(variables):
    return io_toposort([], list(variables))


def assigned(outputs, updates=(), default='dev0'):
    """Return outputs, updates and variables with their places, after checks that hold for any graph."""
    before = {variable: place_of(variable) for variable in ancestors(list(outputs) + list(dict(updates).values()))}
    result = propagation.assigned(outputs, dict(updates), default)
    whole = result[0] + list(result[1].values())
    assert all(isinstance(place_of(output), str) for node in nodes_of(whole) for output in node.outputs)
    assert set(result[2]) == set(shared_variables(whole)) | set(dict(updates))
    assert {variable: place_of(variable) for variable in before} == before, 'the graph of the user was written to'
    assert not set(nodes_of(before)) & set(nodes_of(whole))
    return result


def places(outputs, updates=(), default='dev0'):
    """Return the places of outputs."""
    return [place_of(output) for output in assigned(outputs, updates, default)[0]]


# --- Blocks --------------------------------------------------------------------------------------

def test_blocks_nest(two):
    x = T.matrix()
    with mgpu.device('dev0'):
        first = T.tanh(x)
        with mgpu.device(two[1]):
            second = T.tanh(first)
            with mgpu.device('cpu'):
                third = T.tanh(second)
            with mgpu.device(None):
                fourth = T.tanh(second)
        fifth = T.tanh(x)
    sixth = T.tanh(x)
    assert [place_of(v) for v in (first, second, third, fourth, fifth, sixth)] == \
        ['dev0', 'dev1', 'cpu', None, 'dev0', None]


def test_shared_variables_get_a_place_and_inputs_do_not():
    with mgpu.device('dev1'):
        w, x = parameter(2), T.vector()
    assert place_of(w) == 'dev1' and place_of(x) is None and place_of(parameter(2)) is None
    assert place_of(pickle.loads(pickle.dumps(w))) == 'dev1'


def test_an_exception_ends_its_block_and_a_block_is_of_one_thread():
    with pytest.raises(ZeroDivisionError):
        with mgpu.device('dev1'):
            raise ZeroDivisionError
    assert place_of(T.tanh(T.vector())) is None
    found = []
    with mgpu.device('dev1'):
        thread = threading.Thread(target=lambda: found.append(place_of(T.tanh(T.vector()))))
        thread.start()
        thread.join()
    assert found == [None]


def test_all_outputs_of_an_op_have_its_place():
    with mgpu.device('dev1'):
        values, indices = T.max_and_argmax(T.matrix(), axis=1)
    assert place_of(values) == place_of(indices) == 'dev1'
    assert mgpu.place(indices, 'dev0') is indices and place_of(values) == 'dev0'


def test_place_takes_inputs_and_shared_variables():
    x, w, one = T.matrix(), parameter(2), T.constant(1)
    for variable in (x, w, one):
        assert mgpu.place(variable, 'dev1') is variable
    assert place_of(x) == place_of(w) == 'dev1' and place_of(one) is None


def test_what_cannot_be_placed():
    with pytest.raises(mgpu.ContextError, match='dev7.*known contexts: dev0, dev1'):
        mgpu.device('dev7')
    with pytest.raises(mgpu.ContextError, match='dev7'):
        mgpu.place(T.matrix(), 'dev7')
    with pytest.raises(mgpu.GraphError, match='no Theano variable'):
        mgpu.place(np.ones(2), 'dev0')


def test_clones_keep_their_place():
    x, y = T.vector(), T.row()
    with mgpu.device('dev0'):
        h = T.tanh(x)
    with mgpu.device('dev1'):
        same_type = h.owner.clone_with_new_inputs([T.vector()])
        other_type = h.owner.clone_with_new_inputs([y], strict=False)
        replaced = theano.clone(h * 2, {x: T.vector()}, share_inputs=False)
        plain = h.owner.clone()
    assert place_of_node(plain) == 'dev0'
    assert [place_of_node(node) for node in (same_type, other_type, replaced.owner.inputs[0].owner)] == ['dev0'] * 3


def test_a_beside_is_one_object_in_all_copies():
    token = Beside()
    assert copy.copy(token) is copy.deepcopy(token) is token
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        one, other = pickle.loads(pickle.dumps([token, token], protocol))
        assert one is other and isinstance(one, Beside)


def test_without_placement_nothing_is_patched():
    code = ('import theano_mgpu, theano; from theano.gof.graph import Apply\n'
            'from theano_mgpu.graph.placement.propagation import is_placed\n'
            'def patched():\n'
            '    makers = Apply.__init__, theano.compile.SharedVariable.__init__, theano.gradient._populate_grad_dict\n'
            '    return [hasattr(maker, "__wrapped__") for maker in makers]\n'
            'x = theano.tensor.vector() * 2\n'
            'assert not is_placed([x]) and not any(patched())\n'
            'x.tag.mgpu_place = "dev0"  # as if it was unpickled\n'
            'assert is_placed([x]) and all(patched())\n')
    python('-c', code)


@pytest.mark.parametrize('name', ['tag_new_nodes', 'clones', 'place_gradients'])
def test_each_patch_is_needed(monkeypatch, name):
    """Without the patch, a node or a gradient does not know its place."""
    def gradient_and_clone():
        x = T.vector()
        with mgpu.device('dev1'):
            y = T.tanh(x)
        gradient = T.grad(y.sum(), x)
        return [place_of(gradient), place_of_node(y.owner.clone_with_new_inputs([T.row()], strict=False))]

    assert gradient_and_clone() == ['dev1', 'dev1']
    owner, attribute = {'tag_new_nodes': (Apply, '__init__'), 'clones': (Apply, 'clone_with_new_inputs'),
                        'place_gradients': (theano.gradient, '_populate_grad_dict')}[name]
    monkeypatch.setattr(owner, attribute, getattr(owner, attribute).__wrapped__)
    assert gradient_and_clone() != ['dev1', 'dev1']


# --- Gradients -----------------------------------------------------------------------------------

def dense(x):
    w, b = parameter(4, 3), parameter(3)
    return T.nnet.relu(T.dot(x, w) + b), [w, b]


def convolution(x):
    w, b = parameter(2, 1, 2, 2), parameter(2)
    maps = conv2d(x.reshape((-1, 1, 2, 2)), w, border_mode='half') + b.dimshuffle('x', 0, 'x', 'x')
    return pool_2d(maps, (2, 2), ignore_border=True).flatten(2), [w, b]


def softmax(x):
    w = parameter(4, 3)
    return T.nnet.softmax(T.dot(x, w)), [w]


def batch_norm(x):
    gamma, beta = parameter(4), parameter(4)
    return bn.batch_normalization_train(x, gamma, beta)[0], [gamma, beta]


def recurrent(x):
    w = parameter(4, 4)
    states, _ = theano.scan(lambda h, w: T.tanh(T.dot(h, w)), outputs_info=[x], non_sequences=[w], n_steps=3)
    return states[-1], [w]


LAYERS = [dense, convolution, softmax, batch_norm, recurrent]


def model(layer, block):
    """Return a layer between two others, each in a block; the outputs of the layers, and their parameters."""
    x = T.matrix()
    with block('dev0'):
        w = parameter(4, 4)
        first = T.tanh(T.dot(x, w))
    with block('dev1'):
        second, params = layer(first)
    with block('cpu'):
        loss = T.sqr(second).mean()
    return x, first, second, loss, [w] + params


@pytest.mark.parametrize('layer', LAYERS)
def test_gradients_are_beside_their_forward_ops(layer):
    x, first, second, loss, params = model(layer, mgpu.device)
    gradients = T.grad(loss, params)
    by_layer = T.grad(loss, [second, first])
    assert [place_of(gradient) for gradient in gradients] == ['dev0'] + ['dev1'] * (len(params) - 1)
    assert [place_of(gradient) for gradient in by_layer] == ['cpu', 'dev1']
    forward = set(nodes_of([loss]))
    ones = [node for node in nodes_of(gradients) if place_of_node(node) is None]
    assert len(ones) == 1 and place_of(loss) == 'cpu'  # fill(loss, 1), which theano.grad makes before all others
    assert {place_of_node(node) for node in nodes_of(gradients) if node not in forward} == {'dev0', 'dev1', 'cpu', None}
    found, _, variables = assigned(gradients)
    assert {place_of_node(node) for node in nodes_of(found)} == {'dev0', 'dev1', 'cpu'}
    assert list(map(place_of, found)) == [variables[param] for param in params]


@pytest.mark.parametrize('layer', LAYERS)
def test_the_graph_of_the_gradients_is_that_of_theano(layer):
    """The order in which gradients are derived has no influence on their graphs."""
    def graph(block):
        x, _, _, loss, params = model(layer, block)
        gradients = T.grad(loss, params)
        return checksum([x], gradients, params), [gradient.name for gradient in gradients]

    assert graph(mgpu.device) == graph(lambda name: placed_on(None))


def test_untagged_ops_share_a_beside_with_their_gradients():
    x, w = T.matrix(), parameter(4, 4)
    mgpu.place(w, 'dev1')
    h = T.dot(x, w)
    y = T.tanh(h)
    gradient = T.grad(y.sum(), h)
    assert isinstance(place_of(y), Beside) and place_of(gradient) is place_of(y) is not place_of(h)
    again = T.grad(y.sum(), w)
    assert place_of(again) is place_of(h) and isinstance(place_of(h), Beside)
    second_order = T.grad(again.sum(), w)
    assert place_of_node(second_order.owner) is not None
    assert places([y, gradient, again, second_order]) == ['dev1'] * 4


def test_a_sum_of_gradients_is_beside_its_variable():
    x = T.matrix()
    with mgpu.device('dev0'):
        h, w = T.tanh(x), parameter(2)
    with mgpu.device('dev1'):
        loss = (T.exp(h) + T.sqr(h) + w).sum() + (w * 2).sum()
    sums = T.grad(loss, [h, w])
    assert [str(gradient.owner.op) for gradient in sums] == ['Elemwise{add,no_inplace}'] * 2
    assert list(map(place_of, sums)) == ['dev0', 'dev0']
    assert {place_of(term) for gradient in sums for term in gradient.owner.inputs} == {'dev1'}


def test_known_and_disconnected_and_undefined_gradients_are_as_without_placement():
    x, w, unused = T.vector(), parameter(3), parameter(3)
    with mgpu.device('dev1'):
        h = T.tanh(x * w)
        rounded = T.sgn(h) + T.cast(h, 'int64')
        undefined = theano.gradient.undefined_grad(h)
    known = T.grad(None, w, known_grads=OrderedDict([(h, T.ones_like(h)), (rounded, T.zeros_like(h))]))
    assert place_of(known) == 'dev1'
    with pytest.raises(theano.gradient.DisconnectedInputError):
        T.grad(h.sum(), unused)
    assert T.grad(h.sum(), [unused, w], disconnected_inputs='ignore', return_disconnected='None')[0] is None
    with pytest.raises(theano.gradient.NullTypeGradError):
        T.grad(undefined.sum(), x)


# --- Propagation ---------------------------------------------------------------------------------

def test_whether_anything_is_placed():
    x, w = T.vector(), parameter(3)
    y = x * w
    assert not is_placed([y]) and not is_placed([])
    y.tag.mgpu_place = Beside()
    assert not is_placed([y])
    mgpu.place(w, 'dev1')
    assert is_placed([T.tanh(y)])


def test_the_rules_in_their_order():
    x, y = T.matrix('x'), T.matrix('y')
    w = parameter(3, 3, name='w')
    mgpu.place(w, 'dev1')
    scaled = x / 255                                      # backwards, from its reader
    h = mgpu.place(T.tanh(scaled), 'dev0')
    after = h * 2                                         # its first placed input
    product = T.dot(after, w)                             # beside its parameter
    loss = product.sum() + T.sqr(w).sum()                 # beside its first input: the other is a scalar
    rest = T.exp(y)
    assert places([scaled, h, after, product, T.dot(after, w.T), loss, rest], default='cpu') == \
        ['dev0', 'dev0', 'dev0', 'dev1', 'dev1', 'dev1', 'cpu']
    assert places([mgpu.place(T.tanh(x), 'dev0').sum() + T.sqr(w).sum()]) == ['dev0']
    assert places([mgpu.place(y, 'dev1') + 1, rest]) == ['dev1', 'dev1']


def test_the_first_reader_and_the_first_new_value_count():
    x, a, b = T.matrix(), parameter(3, 3), parameter(3, 3)
    y, new = T.tanh(x), T.matrix() * 2
    readers = [mgpu.place(y * 2, 'dev1'), mgpu.place(y * 3, 'cpu')]
    assert places([y, *readers]) == ['dev1', 'dev1', 'cpu']
    mgpu.place(a, 'dev0')
    mgpu.place(b, 'dev1')
    assert place_of(assigned([], {a: new, b: new}, 'cpu')[1][b]) == 'dev0'


def test_an_output_that_an_update_reads_is_not_moved():
    x, w = mgpu.place(T.matrix(), 'dev0'), mgpu.place(parameter(3, 3), 'dev1')
    y = x * 2
    assert places([y], {w: w + y}) == ['dev0']
    assert place_of(assigned([], {w: w + y})[1][w].owner.inputs[1]) == 'dev1'


def test_a_stand_in_has_the_place_of_what_it_stands_for():
    w, view = parameter(3, 3), parameter(3, 3)
    view.tag.stands_for = w
    assert not is_placed([view * 2])
    mgpu.place(w, 'dev1')
    assert is_placed([view * 2]) and assigned([view * 2])[2] == {view: 'dev1'}


def test_parameters_in_blocks_place_a_model():
    """Lasagne's layers do so: parameters are made with the layer, ops later."""
    x, labels = T.matrix(), T.ivector()
    with mgpu.device('dev0'):
        first = parameter(4, 5)
    with mgpu.device('dev1'):
        second = parameter(5, 3)
    h = T.nnet.relu(T.dot(x, first))
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(h, second)), labels).mean()
    gradients = T.grad(loss, [first, second])
    assert places([h, loss, *gradients], default='cpu') == ['dev0', 'dev1', 'dev0', 'dev1']
    found, _, variables = assigned(gradients, default='cpu')
    assert {place_of_node(node) for node in nodes_of(found)} == {'dev0', 'dev1'}
    assert variables == {first: 'dev0', second: 'dev1'}


def test_ops_in_blocks_place_parameters():
    x, w, tied = T.matrix(), parameter(3, 3), parameter(3, 3)
    with mgpu.device('dev1'):
        h = T.dot(T.dot(x, tied), w)
    with mgpu.device('dev0'):
        h = T.dot(h, tied)
    _, updates, variables = assigned([h], {w: w - T.grad(h.sum(), w), tied: tied - T.grad(h.sum(), tied)})
    assert variables == {w: 'dev1', tied: 'dev1'}
    assert places([h, T.dot(mgpu.place(T.tanh(x), 'dev0'), w)]) == ['dev0', 'dev1']
    assert place_of(updates[w]) == place_of(updates[tied]) == 'dev1'


def adam(gradients, params, rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8):
    """Return the updates of lasagne.updates.adam (version 0.1), with the same graph."""
    updates, step, one = OrderedDict(), theano.shared(np.asarray(0, FLOAT), 't'), T.constant(1)
    t = step + 1
    a_t = rate * T.sqrt(one - beta2 ** t) / (one - beta1 ** t)
    for param, gradient in zip(params, gradients):
        value = param.get_value(borrow=True)
        first, second = (theano.shared(np.zeros(value.shape, value.dtype), broadcastable=param.broadcastable)
                         for _ in range(2))
        m_t = beta1 * first + (one - beta1) * gradient
        v_t = beta2 * second + (one - beta2) * gradient ** 2
        updates[first], updates[second] = m_t, v_t
        updates[param] = param - a_t * m_t / (T.sqrt(v_t) + epsilon)
    updates[step] = t
    return updates


@pytest.mark.parametrize('clipped', [False, True])
def test_updates_and_moments_are_beside_their_parameters(clipped):
    """Parameters of equal shapes, one of them without a block, and no output that tells the model from the updates."""
    x = T.matrix()
    with mgpu.device('dev0'):
        first = parameter(4, 4, name='first')
        h = T.tanh(T.dot(x, first))
    with mgpu.device('dev1'):
        second = parameter(4, 4, name='second')
        h = T.tanh(T.dot(h, second))
    third = parameter(4, 4, name='third')
    loss = T.dot(h, third).mean()
    params = [first, second, third]
    gradients = T.grad(loss, params)
    derived = set(nodes_of(gradients))
    if clipped:
        norm = T.sqrt(sum(T.sqr(gradient).sum() for gradient in gradients))
        derived.update(nodes_of([norm]))
        gradients = [gradient * (1 / T.maximum(norm, 1)) for gradient in gradients]
    updates = adam(gradients, params)
    _, found, variables = assigned([], updates, 'cpu')
    expected = dict(zip(params, ['dev0', 'dev1', 'dev1']))
    keys = list(updates)
    for number, param in enumerate(params):
        group = keys[3 * number:3 * number + 3]
        assert group[-1] is param
        assert [variables[variable] for variable in group] == [expected[param]] * 3
        assert {place_of(found[variable]) for variable in group} == {expected[param]}
    # All arithmetic on arrays after the gradients.
    pairs = zip(nodes_of(updates.values()), nodes_of(found.values()))
    arithmetic = [(node, copied) for node, copied in pairs if node not in derived and node.outputs[0].ndim]
    assert len(arithmetic) > 50 and all(str(node.op) == str(copied.op) for node, copied in arithmetic)
    readers = {variable: node for node, _ in arithmetic for variable in node.inputs}
    for node, copied in arithmetic:
        reached = node
        while not set(reached.outputs) & set(updates.values()):
            reached = readers[reached.outputs[0]]
        variable = next(variable for variable, value in updates.items() if value in reached.outputs)
        assert place_of_node(copied) == variables[variable]


def test_state_that_a_parameter_reads_before_it_is_updated():
    """The new value of the parameter is made of a gradient on another device."""
    x, w, average = T.matrix(), mgpu.place(parameter(3, 3), 'dev1'), parameter(3, 3)
    with mgpu.device('dev0'):
        h = T.dot(x, w)
    gradient = T.grad(h.sum(), w)
    updates = {average: average * 0.9 + T.sqr(gradient), w: w - gradient / T.sqrt(average)}
    _, found, variables = assigned([], updates)
    assert variables[average] == place_of(found[average]) == 'dev1'


def test_a_plain_update_of_a_parameter_is_no_state_of_another():
    """The gradient of the other parameter reads both."""
    x, free, placed = T.matrix(), parameter(4, 4), parameter(4, 4)
    mgpu.place(placed, 'dev1')
    h = mgpu.place(T.tanh(x), 'dev0')
    loss = T.dot(T.tanh(h * free), placed).sum()
    gradients = T.grad(loss, [free, placed])
    updates = {free: free - gradients[0], placed: placed - gradients[1]}
    _, found, variables = assigned([], updates)
    assert [variables[free], place_of(found[free])] == ['dev0', 'dev0']
    assert [variables[placed], place_of(found[placed])] == ['dev1', 'dev1']


def test_averages_of_parameters_and_counters():
    x, average, count, unread = T.matrix(), parameter(3, 3), parameter(), parameter(2)
    with mgpu.device('dev1'):
        w = parameter(3, 3)
        loss = T.dot(x, w).sum()
    new = w - T.grad(loss, w)
    updates = {w: new, average: average * 0.9 + new * 0.1, count: count + 1, unread: T.zeros(2, dtype=FLOAT)}
    _, found, variables = assigned([loss], updates, 'cpu')
    assert [variables[v] for v in (w, average, count, unread)] == ['dev1', 'dev1', 'cpu', 'cpu']
    assert place_of(found[average]) == 'dev1'


@pytest.mark.slow  # the first draw of a process takes long
def test_random_state_is_where_the_draw_is():
    x, streams = T.matrix(), MRG_RandomStreams(3)
    with mgpu.device('dev1'):
        h = T.tanh(x)
        inside = h * streams.binomial((2, 2), p=0.5, dtype=FLOAT)
    outside = T.exp(h) * streams.binomial((2, 2), p=0.5, dtype=FLOAT)
    states = {state: state.default_update for state in shared_variables([inside, outside])}
    _, found, variables = assigned([inside, outside], states)
    assert len(states) == 2 and list(variables.values()) == ['dev1', 'dev1']
    assert [place_of(value) for value in found.values()] == ['dev1', 'dev1']


def test_a_copy_an_ifelse_and_outputs_without_an_owner():
    x, w, target, c = T.matrix(), parameter(3, 3), parameter(3, 3), T.iscalar()
    mgpu.place(w, 'dev1')
    outputs, updates, variables = assigned([x, w, ifelse(c, w, w * 2)], {target: w})
    assert outputs[:2] == [x, w] and place_of(outputs[2]) == 'dev1'
    assert updates == {target: w} and variables == {w: 'dev1', target: 'dev1'}


def test_a_beside_is_one_place_wherever_it_is_found():
    """A transposed parameter comes before the forward op in topological order; backwards, a reader decides."""
    x, w = T.matrix(), parameter(3, 3)
    y = T.dot(x, w)
    mgpu.place(x, 'dev1')
    back = T.grad(T.sqr(y).sum(), x)
    transposed = next(node for node in nodes_of([back]) if node.inputs[0] is w)
    assert place_of_node(transposed) is place_of(y)
    assert places([transposed.outputs[0], y, back]) == ['dev1', 'dev1', 'dev1']
    a, b = (T.tanh(T.vector()) for _ in range(2))
    a.tag.mgpu_place = b.tag.mgpu_place = Beside()
    assert places([mgpu.place(b * 1, 'dev1'), a]) == ['dev1', 'dev1']


# --- Scan ----------------------------------------------------------------------------------------

def test_a_scan_is_placed_as_a_whole():
    x = T.matrix()
    with mgpu.device('dev0'):
        mask = T.tanh(x)
    with mgpu.device('dev1'):
        out, _ = theano.scan(lambda h: h * mask, outputs_info=[x], n_steps=3)  # Theano copies `mask` into the scan
    gradient = T.grad(out.sum(), x)
    assert places([out, gradient]) == ['dev1', 'dev1']
    scan = next(node for node in nodes_of([out]) if hasattr(node.op, 'inner_non_seqs'))
    mgpu.place(scan.outputs[0], 'dev0')
    assert places([scan.outputs[0]]) == ['dev0']


@pytest.mark.parametrize('depth', [1, 2])
def test_a_step_of_a_scan_cannot_be_placed(depth):
    def step(h):
        if depth == 2:
            return theano.scan(inner, outputs_info=[h], n_steps=2)[0][-1]
        return inner(h)

    def inner(h):
        with mgpu.device('dev1'):
            return T.tanh(h)

    x = mgpu.place(T.matrix(), 'dev0')
    out, _ = theano.scan(step, outputs_info=[x], n_steps=3)
    with pytest.raises(mgpu.GraphError, match=r"(?s)tanh.*'dev1' inside of .*scan.*'dev0'.*theano\.scan"):
        propagation.assigned([out], {}, 'dev0')


# --- Keras ---------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def keras_model():
    """Return a model over two devices that are named in blocks around its layers."""
    mgpu.init('dev0->cpu;dev1->cpu')
    x = keras.layers.Input((6, 3))
    with mgpu.device('dev0'):
        h = keras.layers.Dense(4, activation='relu', kernel_regularizer='l2', name='a')(x)
        h = keras.layers.BatchNormalization(name='b')(h)
    with mgpu.device('dev1'):
        h = keras.layers.Dropout(0.2)(h)
        h = keras.layers.LSTM(4, name='c')(h)
        y = keras.layers.Dense(2, activation='softmax', name='d')(h)
    made = keras.models.Model(x, y)
    made.compile('adam', 'categorical_crossentropy', metrics=['accuracy'])
    return made


@pytest.mark.slow_with('SGD')
@pytest.mark.parametrize('optimizer', [keras.optimizers.SGD(momentum=0.9, nesterov=True, clipnorm=1.0),
                                       keras.optimizers.RMSprop(), keras.optimizers.Adadelta(),
                                       keras.optimizers.Adam(amsgrad=True)], ids=lambda each: type(each).__name__)
def test_a_training_function_of_keras(keras_model, optimizer):
    """The test takes the graph of Model._make_train_function, for several optimizers."""
    params = keras_model._collected_trainable_weights
    updates = optimizer.get_updates(loss=keras_model.total_loss, params=params)
    pairs = [update if isinstance(update, tuple) else (update, update.default_update)
             for update in keras_model.updates + updates]
    states = shared_variables([keras_model.total_loss])
    pairs += [(state, state.default_update) for state in states if hasattr(state, 'default_update')]
    metrics = keras_model._get_training_eval_metrics()
    pairs += [update for metric in metrics for update in metric.updates]
    outputs = [keras_model.total_loss] + [metric._call_result for metric in metrics]
    found, new, variables = assigned(outputs, dict(pairs), 'cpu')
    expected = {weight: 'dev0' if layer.name in 'ab' else 'dev1' for layer in keras_model.layers
                for weight in layer.weights}
    assert {weight: variables[weight] for weight in expected} == expected
    assert {weight: place_of(new[weight]) for weight in expected} == expected
    assert list(map(place_of, found)) == ['dev1', 'dev1']
    by_shape = {}
    for weight in params:
        by_shape.setdefault(K.int_shape(weight), set()).add(expected[weight])
    moments = [variable for variable, _ in updates if variable not in expected and K.ndim(variable)]
    assert len(moments) >= len(params)
    for moment in moments:
        assert variables[moment] == place_of(new[moment]) and \
            variables[moment] in by_shape[moment.get_value().shape], moment
    counts = [sum(variables[moment] == place for moment in moments) for place in ('dev0', 'dev1')]
    assert counts[0] * 5 == counts[1] * 4  # a and b have 4 weights, c and d have 5
    assert 'cpu' not in {place_of_node(node) for node in nodes_of(list(new.values())) if node.outputs[0].ndim > 1}


def test_saved_models_do_not_contain_their_placement(keras_model):
    assert 'dev1' not in keras_model.to_json()


# --- Determinism and cost ------------------------------------------------------------------------

DESCRIBE = """
import theano_mgpu as mgpu, numpy as np, theano, theano.tensor as T, sys
sys.path[:0] = ['tests', 'tests/graph']
from test_placement_tags import adam, nodes_of, parameter, place_of, propagation
mgpu.init('dev0->cpu;dev1->cpu')
junk = [object() for _ in range(int(sys.argv[1]))]
x = h = T.matrix()
params = [parameter(4, 4, name=str(i)) for i in range(6)]
for i, param in enumerate(params):
    if i % 3:
        mgpu.place(param, 'dev%d' % (i % 2))
    h = T.tanh(T.dot(h, param)) + h
outputs, updates, variables = propagation.assigned([h], adam(T.grad(h.sum(), params), params), 'cpu')
print([(str(node.op), place_of(node.outputs[0])) for node in nodes_of(outputs + list(updates.values()))])
print([(str(variable), place) for variable, place in variables.items()])
"""


@pytest.mark.slow
def test_all_processes_find_the_same():
    found = {python('-c', DESCRIBE, number).stdout for number in ('1', '100003')}
    assert len(found) == 1 and 'dev1' in found.pop()


def test_a_large_graph_takes_a_fraction_of_a_second():
    h = T.matrix()
    params = [parameter(2, 2) for _ in range(100)]
    for i, param in enumerate(params):
        with mgpu.device('dev%d' % (i // 50)):
            h = T.tanh(T.dot(h, param))
    updates = adam(T.grad(h.sum(), params), params)
    assert len(nodes_of(updates.values())) > 3000
    start = time.process_time()
    propagation.assigned([h], updates, 'dev0')
    assert time.process_time() - start < 2  # 0.1 s
