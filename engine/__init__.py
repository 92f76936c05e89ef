"""One engine: scheduler, block pool, prefix cache, KV tensors, model, runner, sampler."""
