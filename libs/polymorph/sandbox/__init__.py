"""Processes that run code which nobody trusts yet: what they may reach, what they may use, how they answer."""
