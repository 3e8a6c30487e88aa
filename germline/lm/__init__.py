"""Language models by evolution: loading, losses of texts, choices, and rewards of texts that members write."""

from germline.lm.generate import Generate
from germline.lm.loading import LanguageModel, load
from germline.lm.text import Choice, NextToken

__all__ = ["Choice", "Generate", "LanguageModel", "NextToken", "load"]
