"""The form that an output must have: which grammar, and whether it is one."""
