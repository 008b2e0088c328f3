"""From weights to a published step: compared, encoded, stored, committed."""
