"""What every room uses: records, errors, units, tensors and the machinery that runs scripts."""
