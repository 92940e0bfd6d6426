"""Prediction of experts: traces of routers, heads that learn from them, and how well they predict."""
