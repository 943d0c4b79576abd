"""The routes, one module a concern; each has `router(service) -> APIRouter`."""
