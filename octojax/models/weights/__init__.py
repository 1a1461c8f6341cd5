"""Weights of published models: Hugging Face folders of safetensors, read and written by slices.

    config = config_of(folder)                 # config.json -> a config of octojax.models
    weights = Weights(folder, config)          # a reader: path of a leaf -> its array, unread
    state = step.init(params=weights)          # every rank reads what it keeps
    save(folder, config, read, like=folder)    # and back, to the bit

Needs `pip install octojax[weights]`.
"""

from octojax.models.weights.configs import config_from, config_of
from octojax.models.weights.folder import Weights, load, save

__all__ = ["Weights", "config_from", "config_of", "load", "save"]
