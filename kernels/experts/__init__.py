"""Mixtures of experts: routing, the order of tokens by expert, products with stacked weights."""
