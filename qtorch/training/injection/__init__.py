"""Injection: every contraction of any code runs in the engine, inside of a context; see `injection`."""
