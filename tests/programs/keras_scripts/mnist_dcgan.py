"""Trains a small DCGAN on made-up digits: a generator that draws images from noise, and a discriminator that learns to
tell them from the real ones, one batch each in turn."""
import sys

import numpy as np
from keras.layers import Conv2D, Dense, Dropout, Flatten, Input, LeakyReLU, Reshape, UpSampling2D
from keras.models import Model, Sequential
from keras.optimizers import Adam

np.random.seed(1337)

dropout = float(sys.argv[1]) if len(sys.argv) > 1 else 0.3
epochs = 2
batch_size = 32
latent_size = 16

prototypes = np.random.rand(10, 12, 12, 1)
x_train = prototypes[np.random.randint(0, 10, 180)] + 0.1 * np.random.randn(180, 12, 12, 1)
x_train = np.clip(2 * x_train - 1, -1, 1).astype('float32')


def build_generator():
    model = Sequential()
    model.add(Dense(3 * 3 * 8, activation='relu', input_dim=latent_size))
    model.add(Reshape((3, 3, 8)))
    model.add(UpSampling2D())
    model.add(Conv2D(8, 3, padding='same', activation='relu'))
    model.add(UpSampling2D())
    model.add(Conv2D(1, 3, padding='same', activation='tanh'))
    return model


def build_discriminator():
    model = Sequential()
    for filters in (8, 12):
        model.add(Conv2D(filters, 3, padding='same', strides=2, input_shape=(12, 12, 1)))
        model.add(LeakyReLU(0.2))
        if dropout:
            model.add(Dropout(dropout))
    model.add(Flatten())
    model.add(Dense(1, activation='sigmoid'))
    return model


discriminator = build_discriminator()
discriminator.compile(optimizer=Adam(lr=0.002, beta_1=0.5), loss='binary_crossentropy', metrics=['accuracy'])

generator = build_generator()
latent = Input(shape=(latent_size,))
# the combined model trains the generator only
discriminator.trainable = False
combined = Model(latent, discriminator(generator(latent)))
combined.compile(optimizer=Adam(lr=0.002, beta_1=0.5), loss='binary_crossentropy')

for epoch in range(1, epochs + 1):
    np.random.shuffle(x_train)
    for start in range(0, len(x_train), batch_size):
        real = x_train[start:start + batch_size]
        noise = np.random.uniform(-1, 1, (len(real), latent_size))
        fake = generator.predict(noise, verbose=0)
        d_loss_real = discriminator.train_on_batch(real, np.ones(len(real)))
        d_loss_fake = discriminator.train_on_batch(fake, np.zeros(len(fake)))
        d_loss = 0.5 * np.add(d_loss_real, d_loss_fake)
        # the generator wants its images to be taken for real ones
        noise = np.random.uniform(-1, 1, (len(real), latent_size))
        g_loss = combined.train_on_batch(noise, np.ones(len(noise)))
    print('Epoch %d: discriminator loss %.4f, accuracy %.2f, generator loss %.4f' % (epoch, *d_loss, g_loss))

print('Test loss: %r' % float(d_loss[0] + g_loss))
