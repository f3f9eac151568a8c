"""Weights in training: tensor subclasses that hold floats (`master`) or codes (`codes`) and say how they multiply."""
