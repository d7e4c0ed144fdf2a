"""YAML read safely, and strictly: a key given twice in one mapping is an error, where PyYAML keeps the last."""

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # On the nodes as written: later, the pairs that a merge (`<<`) brings may well repeat a key.
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(
                    f"the key {key.value!r} is given twice, in line {lines[name]} and line {line}; keep one of them"
                )
            lines[name] = line
        return node


def read_yaml(text: str) -> Any:
    """What `yaml.safe_load` gives. Raises yaml.YAMLError, also for a key that stands twice in one mapping."""
    return yaml.load(text, _Loader)
