"""Structured output: constraints compiled to grammars, which give the allowed next tokens.

Gateways compile a constraint to reject it if it cannot be served, engines to apply it. Uses
llguidance, from the extra `structured`. Knows no request, no tensor and no node.
"""
