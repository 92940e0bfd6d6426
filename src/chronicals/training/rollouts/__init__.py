"""Rollouts: answers that the trained model draws, their rewards, and the steps made of them."""
