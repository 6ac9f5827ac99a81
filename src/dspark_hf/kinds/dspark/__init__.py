"""DSpark drafters, and DFlash drafters, which are those without heads."""
