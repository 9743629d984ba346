"""Tokens are exact, whatever computes, carries, caches and draws them."""
