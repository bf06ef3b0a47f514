"""Event files in a folder, as TensorBoard itself reads them."""
import io

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(folder):
    """Return the events of a folder: an EventAccumulator that keeps all of them."""
    events = EventAccumulator(str(folder), size_guidance={'scalars': 0, 'histograms': 0, 'images': 0})
    events.Reload()
    return events


def scalars(events, name):
    """Return steps and values of a scalar: a list of pairs."""
    return [(event.step, event.value) for event in events.Scalars(name)]


def pixels(events, name):
    """Return the image of a name, which was written once: an array of uint8, with two axes if it is grey."""
    event, = events.Images(name)
    image = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
    return image[..., 0] if np.ptp(image, axis=-1).max() == 0 else image
