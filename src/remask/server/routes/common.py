"""Functions that several endpoints use."""

from fastapi import Request

from remask.server.service import Service


def service_of(request: Request) -> Service:
    """Return the service of the application that got `request`."""
    service: Service = request.app.state.service
    return service
