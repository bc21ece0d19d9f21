"""The endpoints. Each finds the `Service` in `app.state.service`."""
