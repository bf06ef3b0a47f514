"""deepy: layers, a classifier, and a trainer."""
import logging

from data import classes, show
from deepy.dataset import BasicDataset, MiniBatches
from deepy.layers import Dense, Softmax
from deepy.networks import NeuralClassifier
from deepy.trainers import GeneralNeuralTrainer

logging.disable(logging.CRITICAL)
x, y = classes(150, 20)
model = NeuralClassifier(input_dim=20)
model.stack(Dense(12, 'tanh'), Dense(2, 'linear'), Softmax())
samples = list(zip(x, y))
data = MiniBatches(BasicDataset(train=samples[:120], valid=samples[120:]), batch_size=24)
trainer = GeneralNeuralTrainer(model, 'SGD', {'learning_rate': .1})
for _, costs in zip(range(4), trainer.train(data.train_set(), data.valid_set())):
    show('costs', sorted(costs.values()))
show('probabilities', model.compute(x).sum(axis=0))
show('weights', [abs(each.get_value()).sum() for each in model.parameters])
