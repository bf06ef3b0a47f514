"""Logistic regression by minibatch gradient descent, in the manner of the Deep Learning Tutorials.

usage: logistic_sgd.py [ragged]

With `ragged` the last minibatch of each set is smaller than the others.
"""
import sys

import numpy
import theano
import theano.tensor as T


class LogisticRegression(object):
    """A linear layer and a softmax over classes."""

    def __init__(self, input, n_in, n_out):
        self.W = theano.shared(value=numpy.zeros((n_in, n_out), dtype=theano.config.floatX), name='W', borrow=True)
        self.b = theano.shared(value=numpy.zeros((n_out,), dtype=theano.config.floatX), name='b', borrow=True)
        self.p_y_given_x = T.nnet.softmax(T.dot(input, self.W) + self.b)
        self.y_pred = T.argmax(self.p_y_given_x, axis=1)
        self.params = [self.W, self.b]
        self.input = input

    def negative_log_likelihood(self, y):
        return -T.mean(T.log(self.p_y_given_x)[T.arange(y.shape[0]), y])

    def errors(self, y):
        if y.ndim != self.y_pred.ndim:
            raise TypeError('y should have the same shape as self.y_pred', ('y', y.type, 'y_pred', self.y_pred.type))
        if not y.dtype.startswith('int'):
            raise NotImplementedError()
        return T.mean(T.neq(self.y_pred, y))


def shared_dataset(data_xy, borrow=True):
    """Put a set of samples into shared variables, as floats; labels are cast to integers where they are used."""
    data_x, data_y = data_xy
    shared_x = theano.shared(numpy.asarray(data_x, dtype=theano.config.floatX), borrow=borrow)
    shared_y = theano.shared(numpy.asarray(data_y, dtype=theano.config.floatX), borrow=borrow)
    return shared_x, T.cast(shared_y, 'int32')


def make_digits(rng, n, size, prototypes):
    """Return images of ten classes, one fixed image a class, under noise, and labels."""
    labels = rng.randint(0, 10, n)
    noise = 0.6 * rng.randn(n, size * size)
    return numpy.clip(prototypes[labels] + noise, 0, 1), labels


def load_data(size=8, n_train=300, n_valid=100, n_test=100, seed=1234):
    """Return training, validation and test sets with size*size pixels an image."""
    rng = numpy.random.RandomState(seed)
    prototypes = rng.uniform(0, 1, (10, size * size))
    return [shared_dataset(make_digits(rng, n, size, prototypes)) for n in (n_train, n_valid, n_test)]


def print_params(params):
    for number, param in enumerate(params):
        print('parameter %d %s, mean magnitude %.10g' % (number, param.name, abs(param.get_value()).mean()))


def sgd_optimization_mnist(datasets, learning_rate=0.13, n_epochs=4, batch_size=50):
    train_set_x, train_set_y = datasets[0]
    valid_set_x, valid_set_y = datasets[1]
    test_set_x, test_set_y = datasets[2]

    # how many minibatches there are, with a last one that may be smaller
    n_train_batches, n_valid_batches, n_test_batches = [
        int(numpy.ceil(x.get_value(borrow=True).shape[0] / float(batch_size))) for x, _ in datasets]

    index = T.lscalar()
    x = T.matrix('x')
    y = T.ivector('y')
    classifier = LogisticRegression(input=x, n_in=train_set_x.get_value(borrow=True).shape[1], n_out=10)
    cost = classifier.negative_log_likelihood(y)

    test_model = theano.function(
        inputs=[index],
        outputs=classifier.errors(y),
        givens={
            x: test_set_x[index * batch_size: (index + 1) * batch_size],
            y: test_set_y[index * batch_size: (index + 1) * batch_size]
        }
    )
    validate_model = theano.function(
        inputs=[index],
        outputs=classifier.errors(y),
        givens={
            x: valid_set_x[index * batch_size: (index + 1) * batch_size],
            y: valid_set_y[index * batch_size: (index + 1) * batch_size]
        }
    )

    g_W = T.grad(cost=cost, wrt=classifier.W)
    g_b = T.grad(cost=cost, wrt=classifier.b)
    updates = [(classifier.W, classifier.W - learning_rate * g_W),
               (classifier.b, classifier.b - learning_rate * g_b)]
    train_model = theano.function(
        inputs=[index],
        outputs=cost,
        updates=updates,
        givens={
            x: train_set_x[index * batch_size: (index + 1) * batch_size],
            y: train_set_y[index * batch_size: (index + 1) * batch_size]
        }
    )

    # early stopping: look at `patience` minibatches whatever happens, and at more after an improvement
    patience = 15
    patience_increase = 2
    improvement_threshold = 0.995
    validation_frequency = min(n_train_batches, patience // 2)
    best_validation_loss = numpy.inf
    test_score = 0.
    done_looping = False
    epoch = 0
    while (epoch < n_epochs) and (not done_looping):
        epoch = epoch + 1
        for minibatch_index in range(n_train_batches):
            minibatch_avg_cost = train_model(minibatch_index)
            print('epoch %d, minibatch %d, cost %.10g' % (epoch, minibatch_index, minibatch_avg_cost))
            iter = (epoch - 1) * n_train_batches + minibatch_index
            if (iter + 1) % validation_frequency == 0:
                validation_losses = [validate_model(i) for i in range(n_valid_batches)]
                this_validation_loss = numpy.mean(validation_losses)
                print('epoch %d, validation error %.10g %%' % (epoch, this_validation_loss * 100.))
                if this_validation_loss < best_validation_loss:
                    if this_validation_loss < best_validation_loss * improvement_threshold:
                        patience = max(patience, iter * patience_increase)
                    best_validation_loss = this_validation_loss
                    test_losses = [test_model(i) for i in range(n_test_batches)]
                    test_score = numpy.mean(test_losses)
                    print('epoch %d, test error of the best model %.10g %%' % (epoch, test_score * 100.))
            if patience <= iter:
                done_looping = True
                break

    print('best validation error %.10g %%' % (best_validation_loss * 100.))
    print('with test error %.10g %%' % (test_score * 100.))
    print_params(classifier.params)


if __name__ == '__main__':
    if sys.argv[1:] == ['ragged']:
        sgd_optimization_mnist(load_data(n_train=313, n_valid=77, n_test=109))
    else:
        sgd_optimization_mnist(load_data())
