"""Calibration in the order of the model, one block at a time."""
