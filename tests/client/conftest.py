"""The router in this process before fake workers, as the router's own tests have it."""

from tests.router.conftest import model_folder, site

__all__ = ["model_folder", "site"]
