"""A multilayer perceptron with L1 and L2 terms, in the manner of the Deep Learning Tutorials."""
import numpy
import theano
import theano.tensor as T
from logistic_sgd import LogisticRegression, load_data, print_params


class HiddenLayer(object):
    """A fully connected layer."""

    def __init__(self, rng, input, n_in, n_out, W=None, b=None, activation=T.tanh):
        self.input = input
        if W is None:
            bound = numpy.sqrt(6. / (n_in + n_out))
            W_values = numpy.asarray(rng.uniform(low=-bound, high=bound, size=(n_in, n_out)),
                                     dtype=theano.config.floatX)
            if activation == theano.tensor.nnet.sigmoid:
                W_values *= 4
            W = theano.shared(value=W_values, name='W', borrow=True)
        if b is None:
            b_values = numpy.zeros((n_out,), dtype=theano.config.floatX)
            b = theano.shared(value=b_values, name='b', borrow=True)
        self.W = W
        self.b = b
        lin_output = T.dot(input, self.W) + self.b
        self.output = (lin_output if activation is None else activation(lin_output))
        self.params = [self.W, self.b]


class MLP(object):
    """One hidden layer with tanh, and logistic regression on top."""

    def __init__(self, rng, input, n_in, n_hidden, n_out):
        self.hiddenLayer = HiddenLayer(rng=rng, input=input, n_in=n_in, n_out=n_hidden, activation=T.tanh)
        self.logRegressionLayer = LogisticRegression(input=self.hiddenLayer.output, n_in=n_hidden, n_out=n_out)
        self.L1 = abs(self.hiddenLayer.W).sum() + abs(self.logRegressionLayer.W).sum()
        self.L2_sqr = (self.hiddenLayer.W ** 2).sum() + (self.logRegressionLayer.W ** 2).sum()
        self.negative_log_likelihood = self.logRegressionLayer.negative_log_likelihood
        self.errors = self.logRegressionLayer.errors
        self.params = self.hiddenLayer.params + self.logRegressionLayer.params
        self.input = input


def train_mlp(learning_rate=0.4, L1_reg=0.0005, L2_reg=0.0005, n_epochs=4, batch_size=20, n_hidden=24):
    datasets = load_data(n_train=200, n_valid=60, n_test=60)
    train_set_x, train_set_y = datasets[0]
    valid_set_x, valid_set_y = datasets[1]
    test_set_x, test_set_y = datasets[2]
    n_train_batches = train_set_x.get_value(borrow=True).shape[0] // batch_size
    n_valid_batches = valid_set_x.get_value(borrow=True).shape[0] // batch_size
    n_test_batches = test_set_x.get_value(borrow=True).shape[0] // batch_size

    index = T.lscalar()
    x = T.matrix('x')
    y = T.ivector('y')
    rng = numpy.random.RandomState(1234)
    classifier = MLP(rng=rng, input=x, n_in=64, n_hidden=n_hidden, n_out=10)
    cost = classifier.negative_log_likelihood(y) + L1_reg * classifier.L1 + L2_reg * classifier.L2_sqr

    test_model = theano.function(
        inputs=[index],
        outputs=classifier.errors(y),
        givens={
            x: test_set_x[index * batch_size:(index + 1) * batch_size],
            y: test_set_y[index * batch_size:(index + 1) * batch_size]
        }
    )
    validate_model = theano.function(
        inputs=[index],
        outputs=classifier.errors(y),
        givens={
            x: valid_set_x[index * batch_size:(index + 1) * batch_size],
            y: valid_set_y[index * batch_size:(index + 1) * batch_size]
        }
    )
    gparams = [T.grad(cost, param) for param in classifier.params]
    updates = [(param, param - learning_rate * gparam) for param, gparam in zip(classifier.params, gparams)]
    train_model = theano.function(
        inputs=[index],
        outputs=cost,
        updates=updates,
        givens={
            x: train_set_x[index * batch_size: (index + 1) * batch_size],
            y: train_set_y[index * batch_size: (index + 1) * batch_size]
        }
    )

    best_validation_loss = numpy.inf
    for epoch in range(1, n_epochs + 1):
        for minibatch_index in range(n_train_batches):
            minibatch_avg_cost = train_model(minibatch_index)
            print('epoch %d, minibatch %d, cost %.10g' % (epoch, minibatch_index, minibatch_avg_cost))
        this_validation_loss = numpy.mean([validate_model(i) for i in range(n_valid_batches)])
        print('epoch %d, validation error %.10g %%' % (epoch, this_validation_loss * 100.))
        if this_validation_loss < best_validation_loss:
            best_validation_loss = this_validation_loss
            test_score = numpy.mean([test_model(i) for i in range(n_test_batches)])
            print('epoch %d, test error of the best model %.10g %%' % (epoch, test_score * 100.))
    print('best validation error %.10g %%' % (best_validation_loss * 100.))
    print_params(classifier.params)


if __name__ == '__main__':
    train_mlp()
