"""How Sphinx makes the documentation: plain Markdown, through MyST."""

project = "fusion-patterns"
author = "the fusion-patterns authors"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
html_theme = "alabaster"
html_theme_options = {"description": "Fusion patterns as data for TVM Relax", "page_width": "1100px"}
exclude_patterns = ["build"]
