"""Forests of regression trees: evaluated with numpy alone, stored without pickle."""
