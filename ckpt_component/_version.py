"""The version of the package, which the build reads here."""

__version__ = "0.3.0"
