"""Settings of the documentation site: ``sphinx-build -W --keep-going docs build/docs``."""

import gc
import sys
from pathlib import Path

# A collection would look at the nodes of all pages, again and again: a fifth of
# the time. Without collections, half a gigabyte more is needed.
gc.disable()
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from rlzmq.core.version import __version__ as version  # noqa: E402

project = "rlzmq"
release = version
html_title = f"rlzmq {release}"
copyright = "the rlzmq authors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "generated_pages",
]
exclude_patterns = ["examples", "maintainers"]
source_suffix = {
    ".md": "markdown",
    ".rst": "restructuredtext",
    ".ipynb": "markdown",
}  # generated_pages reads it

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
highlight_language = (
    "none"  # blocks without a language are commands and their output
)
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_use_type_comments = False
napoleon_use_rtype = False
default_role = (
    "name"  # generated_pages: a link for public names, code for all others
)
toc_object_entries = False
maximum_signature_line_length = 90
