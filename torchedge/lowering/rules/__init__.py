"""How ATen operators become nodes: one function an operator, registered under its ATen name.

Operators without a rule that PyTorch can express by others are decomposed during capture
(`tracing.decompositions`), so that a rule is needed only where the whole operator makes faster or more exact
kernels than its parts.
"""

from torchedge.lowering.rules.registry import Result, Rule, all_rules, rule, rule_for

__all__ = ["Result", "Rule", "all_rules", "rule", "rule_for"]
