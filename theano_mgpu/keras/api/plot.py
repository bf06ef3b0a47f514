"""`plot_model`: a picture of a Keras model in the colours of its devices."""
from __future__ import annotations

import importlib.util
import os
from typing import Any

import keras

from ...devices.contexts import contexts as active_contexts
from ...devices.mesh import CPU
from ...errors import MgpuError
from ...plan.layout import placed
from ...utils.files import whole_file
from .multi_gpu import check_built

WIDTH, HEIGHT = 3.1, 1.0   # inches of a box, with the space around it
BOX = 2.6, 0.6             # inches of the box itself
MARGIN = 0.9               # inches on the left and on the right
LABEL = 1.6, 0.3           # inches of a device in the legend
NO_DEVICE = 'white'        # inputs, and models that are not placed


def plot_model(model: keras.Model, to_file: str = 'model.png') -> None:
    """Draw a model: a box for each layer, in the colour of its device.

    Parameters
    ----------
    model : keras.Model
        Built. Its layers are placed by blocks (see `mgpu.device`) or by `place`; other layers are drawn where they
        run. A nested model is one box.
    to_file : str
        A .png, .pdf or .svg file.

    Raises
    ------
    MgpuError
        If matplotlib is not installed.
    ValueError
        If the model is not built.
    ContextError
        If the model is placed on contexts that it cannot run on.
    """
    if importlib.util.find_spec('matplotlib') is None:
        raise MgpuError('plot_model needs matplotlib, which is not installed: pip install "theano_mgpu[bench]"')
    check_built(model, 'plot_model')
    model = getattr(model, 'template', model)
    inputs = {layer: list(dict.fromkeys(each for call in calls for each in call.inbound_layers))
              for layer, calls in _calls(model).items()}
    _draw(running_places(model), inputs, to_file)


def running_places(model: keras.Model) -> dict[keras.layers.Layer, str | None]:
    """Return the place where each layer of a model runs.

    Parameters
    ----------
    model : keras.Model
        Built.

    Returns
    -------
    dict of keras.layers.Layer to (str or None)
        In the order of the layers, the place of each as in a function; None for inputs, and for all layers of a model
        that is not placed.
    """
    calls = [(layer, call) for layer, calls in _calls(model).items() for call in calls]
    outputs, _, _ = placed([call.output_tensors[0] for _, call in calls], {}, active_contexts())
    places = dict.fromkeys(_calls(model))
    for (layer, _), output in zip(calls, outputs):
        if output.owner is not None and not isinstance(layer, keras.layers.InputLayer):
            place = getattr(output.tag, 'mgpu_place', None)
            places[layer] = places[layer] or (place if isinstance(place, str) else None)
    return places


def _calls(model):
    """Return the calls of each layer that belong to a model, in the order of the layers.

    Layers that a Sequential leaves out are among them.
    """
    known = {call for calls in model._nodes_by_depth.values() for call in calls}
    return {layer: [call for call in layer._inbound_nodes if call in known]
            for layer in [*getattr(model, '_layers', ()), *model.layers]}


def positions(inputs: dict[Any, list[Any]]) -> dict[Any, tuple[float, int]]:
    """Lay out a graph in rows: each layer is below all that it takes inputs from.

    Parameters
    ----------
    inputs : dict of object to list of object
        For each layer, in topological order, the layers that it takes inputs from.

    Returns
    -------
    dict of object to (float, int)
        Column and row. A layer is as near as possible below the middle of its inputs.

    Examples
    --------
    >>> positions({'a': [], 'b': ['a'], 'c': ['a'], 'd': ['b', 'c']})
    {'a': (0.0, 0), 'b': (-0.5, 1), 'c': (0.5, 1), 'd': (0.0, 2)}
    """
    rows: dict[Any, int] = {}
    columns: dict[Any, float] = {}
    pending = list(inputs)
    while pending:
        layer = next((each for each in pending if all(i in rows for i in inputs[each])), pending[0])
        pending.remove(layer)
        rows[layer] = 1 + max((rows[each] for each in inputs[layer] if each in rows), default=-1)
    for row in range(max(rows.values()) + 1):
        here = [layer for layer in inputs if rows[layer] == row]
        middle = {layer: sum(columns.get(each, 0) for each in inputs[layer]) / max(1, len(inputs[layer]))
                  for layer in here}
        here.sort(key=middle.__getitem__)
        left = (sum(middle.values()) / len(here)) - (len(here) - 1) / 2
        columns.update((layer, left + i) for i, layer in enumerate(here))
    return {layer: (columns[layer], rows[layer]) for layer in inputs}


def _draw(places, inputs, path):
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, Patch
    there, names = positions(inputs), _names(places)
    palette = matplotlib.rcParamsDefault['axes.prop_cycle'].by_key()['color'] * len(names)
    colours = dict(zip(names, map(_light, palette)), **{CPU: 'lightgrey'})
    columns, rows = zip(*there.values())
    width = (max(columns) - min(columns)) * WIDTH + BOX[0] + 2 * MARGIN
    n_across = max(1, int(width / LABEL[0]))
    top = -BOX[1] / 2 - 0.2 - LABEL[1] * -(-len(names) // n_across)
    bottom = max(rows) * HEIGHT + BOX[1] / 2 + 0.2
    left = min(columns) * WIDTH - BOX[0] / 2 - MARGIN
    figure = Figure(figsize=(width, bottom - top))
    FigureCanvasAgg(figure)  # without pyplot, whose backend is the user's
    axis = figure.add_axes([0, 0, 1, 1], xlim=(left, left + width), ylim=(bottom, top))
    axis.axis('off')
    for layer, (column, row) in there.items():
        x, y = column * WIDTH, row * HEIGHT
        axis.add_patch(FancyBboxPatch((x - BOX[0] / 2, y - BOX[1] / 2), *BOX, boxstyle='round,pad=0,rounding_size=0.08',
                                      facecolor=colours.get(places[layer], NO_DEVICE), edgecolor='black', zorder=2))
        axis.text(x, y, _text(layer, places[layer]), ha='center', va='center', fontsize=8, zorder=3)
        for other in inputs[layer]:
            axis.add_patch(_arrow(there[other], there[layer]))
    if names:
        axis.legend(handles=[Patch(facecolor=colours[name], edgecolor='black', label=label)
                             for name, label in names.items()],
                    loc='upper center', ncol=min(n_across, len(names)), frameon=False, fontsize=9)
    root, kind = os.path.splitext(path)
    with whole_file(root + (kind or '.png')) as unfinished:
        figure.savefig(unfinished, dpi=120, format=kind[1:] or 'png')


def _arrow(above, below):
    """Return an arrow from one layer to another, around the layers in the rows between them."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path
    (x0, y0), (x1, y1) = [(column * WIDTH, row * HEIGHT) for column, row in (above, below)]
    points = [(x0, y0 + BOX[1] / 2), (x1, y1 - BOX[1] / 2)]
    codes = [Path.MOVETO, Path.LINETO]
    n_rows = below[1] - above[1]
    if n_rows > 1:
        side = 1 if x0 + x1 > 0 else -1
        beside = side * (max(side * x0, side * x1) + BOX[0] / 2 + min(0.15 * n_rows, 1.15 * MARGIN))
        points = [(x0 + side * BOX[0] / 2, y0), (beside, y0), (beside, y1), (x1 + side * BOX[0] / 2, y1)]
        codes = [Path.MOVETO] + [Path.CURVE4] * 3
    return FancyArrowPatch(path=Path(points, codes), arrowstyle='-|>', mutation_scale=9, color='black', linewidth=0.9,
                           zorder=1)


def _names(places):
    """Return the places that are in use, in the order of the contexts, and their names in the legend."""
    labels = {context.name: '%s (%s)' % (context.name, context.device) for context in active_contexts()}
    return {name: label for name, label in dict(labels, **{CPU: 'the host'}).items() if name in places.values()}


def _light(colour):
    """Return a colour on which black text can be read, from one as ``#1f77b4``."""
    return tuple(0.45 * int(colour[i:i + 2], 16) / 255 + 0.55 for i in (1, 3, 5))


def _text(layer, place):
    shapes = layer.output_shape if isinstance(layer.output_shape, list) else [layer.output_shape]
    title = '%s: %s' % (layer.name, type(layer).__name__)
    return '\n'.join([title, ', '.join(map(str, shapes[:2])) + ', ...' * (len(shapes) > 2)] + [place] * bool(place))
