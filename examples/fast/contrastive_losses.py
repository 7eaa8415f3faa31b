"""Losses for representation learning."""

import torch


def supervised_contrastive_loss(embeddings, labels, temperature=0.2):
    """Equation 2 of Khosla et al., Supervised Contrastive Learning (2020).

    The embeddings have length one; every row with the same label is a positive.
    """
    similarity = embeddings @ embeddings.T / temperature
    itself = torch.eye(len(labels), dtype=torch.bool)
    positives = (labels[:, None] == labels) & ~itself
    log_denominator = torch.logsumexp(similarity.masked_fill(itself, -torch.inf), dim=1)
    mean_positive = (similarity * positives).sum(dim=1) / positives.sum(dim=1)
    return (log_denominator - mean_positive).mean()
