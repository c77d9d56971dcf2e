"""What the tests of the service share."""

from tests.service.conftest import serve, template

__all__ = ["serve", "template"]
