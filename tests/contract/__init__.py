"""What every adapter of a port must do. The contracts are classes; each adapter's tests inherit them."""

import pytest

pytest.register_assert_rewrite("tests.contract.log", "tests.contract.state_store", "tests.contract.view")
