"""The places of the layers of a Keras model."""
from theano_mgpu.graph.placement.tags import place_of
from theano_mgpu.keras.api.placement import ops_of, with_inner


def layer_places(model):
    """Return the place of each layer by name: where its weights are, else its ops; None where its neighbours are."""
    return {path: place_of_layer(layer) for path, layer in with_inner(model, '')}


def place_of_layer(layer):
    inner = set(map(place_of_layer, getattr(layer, 'layers', ())))
    if inner:  # a nested model
        return inner.pop() if len(inner) == 1 else None
    places = [place_of(variable) for variable in layer.weights + ops_of(layer)]
    return next((place for place in places if isinstance(place, str)), None)
