"""Proof that a fill keeps what the model says: quality figures, their controls and their intervals."""
