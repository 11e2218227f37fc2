"""How on-policy data are: the centred log-likelihood phi = log p + H of every token, its tests, filters and remedies."""
