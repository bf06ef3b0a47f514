"""Trains a variational autoencoder on made-up digits. Its loss, reconstruction plus Kullback-Leibler divergence, is
added to the model itself (Kingma and Welling 2013)."""
import sys

import numpy as np
from keras import backend as K
from keras.layers import Dense, Input, Lambda
from keras.losses import binary_crossentropy
from keras.models import Model
from keras.optimizers import Adam

np.random.seed(1337)

epsilon_std = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
original_dim = 144
intermediate_dim = 32
latent_dim = 2
batch_size = 32
epochs = 2

prototypes = np.random.randint(0, 2, (10, original_dim))


def make_digits(samples):
    labels = np.random.randint(0, 10, samples)
    images = abs(prototypes[labels] - 0.1 * np.random.rand(samples, original_dim))
    return images.astype('float32'), labels


def sampling(args):
    """Draw a point from the Gaussian of each sample: z = mean + sqrt(variance) * noise."""
    z_mean, z_log_var = args
    epsilon = K.random_normal(shape=(K.shape(z_mean)[0], latent_dim))
    return z_mean + epsilon_std * K.exp(0.5 * z_log_var) * epsilon


x_train, y_train = make_digits(240)
x_test, y_test = make_digits(75)

# encoder: an image to the mean and the logarithm of the variance, and a sample of them
inputs = Input(shape=(original_dim,), name='encoder_input')
x = Dense(intermediate_dim, activation='relu')(inputs)
z_mean = Dense(latent_dim, name='z_mean')(x)
z_log_var = Dense(latent_dim, name='z_log_var')(x)
z = Lambda(sampling, output_shape=(latent_dim,), name='z')([z_mean, z_log_var])
encoder = Model(inputs, [z_mean, z_log_var, z], name='encoder')

# decoder: a latent point to an image
latent_inputs = Input(shape=(latent_dim,), name='z_sampling')
x = Dense(intermediate_dim, activation='relu')(latent_inputs)
decoder = Model(latent_inputs, Dense(original_dim, activation='sigmoid')(x), name='decoder')

outputs = decoder(encoder(inputs)[2])
vae = Model(inputs, outputs, name='vae_mlp')

reconstruction_loss = original_dim * binary_crossentropy(inputs, outputs)
kl_loss = -0.5 * K.sum(1 + z_log_var - K.square(z_mean) - K.exp(z_log_var), axis=-1)
vae.add_loss(K.mean(reconstruction_loss + kl_loss))
vae.compile(optimizer=Adam(lr=0.003))
vae.summary()
vae.fit(x_train, epochs=epochs, batch_size=batch_size, verbose=2, validation_data=(x_test, None))

# the place of each digit in the latent space, and the images along a walk through it
means, _, _ = encoder.predict(x_test, batch_size=batch_size)
for digit in range(10):
    print('digit', digit, 'at', means[y_test == digit].mean(axis=0))
walk = np.stack([np.linspace(-2, 2, 9), np.zeros(9)], axis=1)
print('brightness along the first axis:', decoder.predict(walk).mean(axis=1))
print('Test loss: %r' % float(vae.evaluate(x_test, None, batch_size=batch_size, verbose=0)))
