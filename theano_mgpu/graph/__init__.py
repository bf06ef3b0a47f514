"""Theano graphs: clone, compile for a context, audit."""
