"""ResNet-20 in Keras, a model with many batch normalisations."""
import keras
from keras import layers


def resnet(size, filters, channels=3, blocks=3):
    """Return ResNet-20 for small images (He et al., Deep residual learning for image recognition, 2015, 4.2)."""
    def normalised(x, n, strides=1, width=3):
        return layers.BatchNormalization()(layers.Conv2D(n, width, strides=strides, padding='same', use_bias=False)(x))
    image = layers.Input((size, size, channels))
    x = layers.Activation('relu')(normalised(image, filters))
    for stage in range(3):
        n = filters << stage
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            y = layers.Activation('relu')(normalised(x, n, strides))
            shortcut = normalised(x, n, strides, width=1) if strides > 1 else x
            x = layers.Activation('relu')(layers.add([normalised(y, n), shortcut]))
    return keras.Model(image, layers.Dense(10, activation='softmax')(layers.GlobalAveragePooling2D()(x)))
