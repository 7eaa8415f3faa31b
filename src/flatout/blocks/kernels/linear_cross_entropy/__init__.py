"""The cross entropy of a linear layer's result, over vocabularies whose logits do not fit."""
