"""The KV pool: blocks, who holds them, the memory behind them."""
