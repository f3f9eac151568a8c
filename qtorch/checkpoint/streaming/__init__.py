"""Rewriting a checkpoint tensor by tensor, without the model: the parts of `quantize_checkpoint`.

skeleton      a model without data, made from names and shapes, for which recipes are looked up
forms         what is written: the own format, or a folder in a format of another package
partial       the unfinished checkpoint on disk, and its journal
calibrated    the weights of recipes that calibrate, made with one block of the model in memory
meta_model    a model of transformers without weights
companions    the other files of a folder: configuration, tokenizer
"""
