"""What an output must look like, as grammars that say which tokens may come next.

Gateways compile to refuse what cannot be served, engines to obey. Uses llguidance, which is the
extra `structured`; knows no request, no tensor and no node.
"""
