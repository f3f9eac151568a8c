"""Everything static is in pyproject.toml; this file is the place for compiled extensions."""

from setuptools import setup

setup()
