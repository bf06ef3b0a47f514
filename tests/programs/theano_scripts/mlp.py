"""A layer of the other scripts, in the manner of the Deep Learning Tutorials."""
import numpy
import theano
import theano.tensor as T


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
