"""What a pattern table is: its models, reading it with positions, finding it by name.

This room knows nothing of TVM's IR beyond the names of operators.
"""

from fusion_patterns.table.model import Fragment, Node, Origin, Predicate, Row, Scope, Table
from fusion_patterns.table.reading import builtin_names, load_table
from fusion_patterns.table.writing import dump_table, json_schema

__all__ = [
    "Fragment",
    "Node",
    "Origin",
    "Predicate",
    "Row",
    "Scope",
    "Table",
    "builtin_names",
    "dump_table",
    "json_schema",
    "load_table",
]
