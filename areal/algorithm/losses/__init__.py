"""Owns the policy losses, one module each, named as `actor.policy_loss` names them."""
