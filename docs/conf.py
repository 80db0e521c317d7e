"""Configuration of Sphinx; `python -m tools.docs` stages the pages."""

from __future__ import annotations

import patchlight
from tools.docs.words import as_rst

project = "Patchlight"
author = "the Patchlight developers"
copyright = "the Patchlight developers"
version = release = patchlight.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
smartquotes = False
exclude_patterns = ["_static", "**.ipynb_checkpoints"]
suppress_warnings = ["misc.highlighting_failure"]

myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_show_tb = True
nb_render_markdown_format = "myst"
nb_output_stderr = "remove"  # progress bars

autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "Patchlight"
html_logo = html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["docs.css"]
html_show_search_summary = False
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#5b4a8a", "color-brand-content": "#5b4a8a"},
    "dark_css_variables": {"color-brand-primary": "#f7b32b", "color-brand-content": "#f7b32b"},
}


def setup(app):
    """Docstrings are plain text with `code`, in Google style."""

    def plain_text(app, what, name, thing, options, lines):
        lines[:] = as_rst(lines)

    app.connect("autodoc-process-docstring", plain_text, priority=100)  # before napoleon, which writes reStructuredText
