"""How each ATen operator becomes nodes. One entry an operator, one file a family: the place to add one."""

from torchedge.lowering.rules.registry import FAMILIES, Result, Rule, all_rules, rule, rule_for

__all__ = ["FAMILIES", "Result", "Rule", "all_rules", "rule", "rule_for"]
