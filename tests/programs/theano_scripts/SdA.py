"""Stacked denoising autoencoders, pretrained and then fine-tuned, in the manner of the Deep Learning Tutorials."""
import numpy
import theano
import theano.tensor as T
from dA import dA
from logistic_sgd import LogisticRegression, load_data, print_params
from mlp import HiddenLayer
from theano.tensor.shared_randomstreams import RandomStreams


class SdA(object):
    """Sigmoid layers that share their weights with denoising autoencoders, and logistic regression on top."""

    def __init__(self, numpy_rng, theano_rng=None, n_ins=64, hidden_layers_sizes=(24, 24), n_outs=10):
        self.sigmoid_layers = []
        self.dA_layers = []
        self.params = []
        self.n_layers = len(hidden_layers_sizes)
        assert self.n_layers > 0
        if not theano_rng:
            theano_rng = RandomStreams(numpy_rng.randint(2 ** 30))
        self.x = T.matrix('x')
        self.y = T.ivector('y')
        for i in range(self.n_layers):
            input_size = n_ins if i == 0 else hidden_layers_sizes[i - 1]
            layer_input = self.x if i == 0 else self.sigmoid_layers[-1].output
            sigmoid_layer = HiddenLayer(rng=numpy_rng, input=layer_input, n_in=input_size,
                                        n_out=hidden_layers_sizes[i], activation=T.nnet.sigmoid)
            self.sigmoid_layers.append(sigmoid_layer)
            self.params.extend(sigmoid_layer.params)
            dA_layer = dA(numpy_rng=numpy_rng, theano_rng=theano_rng, input=layer_input, n_visible=input_size,
                          n_hidden=hidden_layers_sizes[i], W=sigmoid_layer.W, bhid=sigmoid_layer.b)
            self.dA_layers.append(dA_layer)
        self.logLayer = LogisticRegression(input=self.sigmoid_layers[-1].output, n_in=hidden_layers_sizes[-1],
                                           n_out=n_outs)
        self.params.extend(self.logLayer.params)
        self.finetune_cost = self.logLayer.negative_log_likelihood(self.y)
        self.errors = self.logLayer.errors(self.y)

    def pretraining_functions(self, train_set_x, batch_size):
        index = T.lscalar('index')
        corruption_level = T.scalar('corruption')
        learning_rate = T.scalar('lr')
        batch_begin = index * batch_size
        batch_end = batch_begin + batch_size
        pretrain_fns = []
        for dA_layer in self.dA_layers:
            cost, updates = dA_layer.get_cost_updates(corruption_level, learning_rate)
            fn = theano.function(
                inputs=[
                    index,
                    theano.In(corruption_level, value=0.2),
                    theano.In(learning_rate, value=0.1)
                ],
                outputs=cost,
                updates=updates,
                givens={
                    self.x: train_set_x[batch_begin: batch_end]
                }
            )
            pretrain_fns.append(fn)
        return pretrain_fns

    def build_finetune_functions(self, datasets, batch_size, learning_rate):
        (train_set_x, train_set_y) = datasets[0]
        (valid_set_x, valid_set_y) = datasets[1]
        (test_set_x, test_set_y) = datasets[2]
        n_valid_batches = valid_set_x.get_value(borrow=True).shape[0] // batch_size
        n_test_batches = test_set_x.get_value(borrow=True).shape[0] // batch_size
        index = T.lscalar('index')
        gparams = T.grad(self.finetune_cost, self.params)
        updates = [(param, param - gparam * learning_rate) for param, gparam in zip(self.params, gparams)]
        train_fn = theano.function(
            inputs=[index],
            outputs=self.finetune_cost,
            updates=updates,
            givens={
                self.x: train_set_x[index * batch_size: (index + 1) * batch_size],
                self.y: train_set_y[index * batch_size: (index + 1) * batch_size]
            },
            name='train'
        )
        test_score_i = theano.function(
            [index],
            self.errors,
            givens={
                self.x: test_set_x[index * batch_size: (index + 1) * batch_size],
                self.y: test_set_y[index * batch_size: (index + 1) * batch_size]
            },
            name='test'
        )
        valid_score_i = theano.function(
            [index],
            self.errors,
            givens={
                self.x: valid_set_x[index * batch_size: (index + 1) * batch_size],
                self.y: valid_set_y[index * batch_size: (index + 1) * batch_size]
            },
            name='valid'
        )

        def valid_score():
            return [valid_score_i(i) for i in range(n_valid_batches)]

        def test_score():
            return [test_score_i(i) for i in range(n_test_batches)]

        return train_fn, valid_score, test_score


def train_SdA(finetune_lr=0.8, pretraining_epochs=2, pretrain_lr=0.02, training_epochs=6, batch_size=20):
    datasets = load_data(n_train=120, n_valid=60, n_test=60)
    train_set_x, train_set_y = datasets[0]
    n_train_batches = train_set_x.get_value(borrow=True).shape[0] // batch_size
    numpy_rng = numpy.random.RandomState(89677)
    sda = SdA(numpy_rng=numpy_rng, n_ins=64, hidden_layers_sizes=[24, 24], n_outs=10)

    pretraining_fns = sda.pretraining_functions(train_set_x=train_set_x, batch_size=batch_size)
    corruption_levels = [.1, .2]
    for i in range(sda.n_layers):
        for epoch in range(pretraining_epochs):
            c = []
            for batch_index in range(n_train_batches):
                c.append(pretraining_fns[i](index=batch_index, corruption=corruption_levels[i], lr=pretrain_lr))
            print('pretraining layer %d, epoch %d, cost %.10g' % (i, epoch, numpy.mean(c, dtype='float64')))
    # the values that they were compiled with
    print('pretraining with the default rate, cost %.10g' % pretraining_fns[0](0))

    train_fn, validate_model, test_model = sda.build_finetune_functions(datasets=datasets, batch_size=batch_size,
                                                                        learning_rate=finetune_lr)
    best_validation_loss = numpy.inf
    for epoch in range(1, training_epochs + 1):
        for minibatch_index in range(n_train_batches):
            minibatch_avg_cost = train_fn(minibatch_index)
        print('epoch %d, minibatch %d, cost %.10g' % (epoch, minibatch_index, minibatch_avg_cost))
        this_validation_loss = numpy.mean(validate_model(), dtype='float64')
        print('epoch %d, validation error %.10g %%' % (epoch, this_validation_loss * 100.))
        if this_validation_loss < best_validation_loss:
            best_validation_loss = this_validation_loss
            test_score = numpy.mean(test_model(), dtype='float64')
            print('epoch %d, test error of the best model %.10g %%' % (epoch, test_score * 100.))
    print_params(sda.params + [layer.b_prime for layer in sda.dA_layers])


if __name__ == '__main__':
    train_SdA()
