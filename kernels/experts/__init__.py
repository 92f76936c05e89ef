"""Mixtures of experts: routing, ordering of tokens by expert, products with stacked weights."""
