"""launch_prefill: computes prompts, samples first tokens, is the source of hand-offs."""
