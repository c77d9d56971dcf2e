"""Steps in which some rows have a constraint, as two captured halves: what may be chosen is told between them."""
