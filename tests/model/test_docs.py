from pathlib import Path

import pytest

from neuron_fabric.model.docs import filled

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text, "run: python -m neuron_fabric.model.docs"


def test_a_part_that_nobody_makes_is_named():
    with pytest.raises(ValueError, match="no generated part 'poem'"):
        filled("<!-- generated: poem -->\n<!-- end -->")
