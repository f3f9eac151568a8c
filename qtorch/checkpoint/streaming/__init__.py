"""Rewriting a checkpoint tensor by tensor, without the model: the parts of `quantize_checkpoint`.

assignment    the recipe of each tensor, looked up in a model without data that is made from names and shapes
forms         what is written: the own format, or a folder in a format of another package, with its other files
partial       the unfinished checkpoint on disk, and its journal
calibrate     the weights of recipes that calibrate, made with one block of the model in memory
"""
