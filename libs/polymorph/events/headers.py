"""HTTP headers between a gateway and its workers."""

RETRY = b"x-polymorph-retry"
ELSEWHERE = b"elsewhere"
"""`x-polymorph-retry: elsewhere` on a request: another worker can take it. On an answer 503: let another take it.

A worker whose engine is being restarted holds a request without the header until it can serve it.
"""
