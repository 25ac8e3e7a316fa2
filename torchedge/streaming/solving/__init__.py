"""The solver: plans that are proven optimal where that can be, with a lower bound always."""
