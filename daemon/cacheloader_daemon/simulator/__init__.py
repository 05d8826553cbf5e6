"""A node in virtual time: the real planner, a modelled origin and modelled jobs. Equal settings give equal results."""
