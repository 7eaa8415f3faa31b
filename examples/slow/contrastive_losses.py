"""Losses for representation learning."""

import torch


def supervised_contrastive_loss(embeddings, labels, temperature=0.2):
    """Equation 2 of Khosla et al., Supervised Contrastive Learning (2020).

    The embeddings have length one; every row with the same label is a positive.
    """
    losses = []
    for i in range(len(embeddings)):
        similarity = embeddings @ embeddings[i] / temperature
        others = torch.arange(len(labels)) != i
        positives = others & (labels == labels[i])
        log_denominator = torch.logsumexp(similarity[others], dim=0)
        losses.append((log_denominator - similarity[positives]).mean())
    return torch.stack(losses).mean()
