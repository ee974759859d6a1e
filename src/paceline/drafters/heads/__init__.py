"""Trained heads: small networks that draft from the target's hidden states (formats: paceline.models.heads)."""
