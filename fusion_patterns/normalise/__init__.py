"""A module in inference form: the same meaning in fewer and plainer operators, before anything is matched."""

from .inference_form import normalise

__all__ = ["normalise"]
